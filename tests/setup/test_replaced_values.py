"""Options that stand in for values of a model's files: configuration, sampling, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import serving_config
from pypto_serving.errors import ConfigError, ModelError, PyptoError
from pypto_serving.model.raw_config import overridden
from pypto_serving.model.registry import read_config
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.setup.option_table import QUIET_DEFAULTS
from pypto_serving.setup.options import make_options
from pypto_serving.setup.prepare import model_spec, prepare
from pypto_serving.setup.resolver import Resolved
from pypto_serving.types.model import ModelSpec
from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def resolved(path: Path, **given: Any) -> tuple[Resolved, ModelSpec]:
    options = make_options({"model": str(path), "kv_memory": "64MiB", "kernels": "torch", **given}, as_arguments=True)
    spec = model_spec(options)
    return prepare(options, spec, QUIET_DEFAULTS, serves=False), spec


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("as_text", [True, False])
def test_overrides_reach_the_model(path: Path, name: str, as_text: bool) -> None:
    given = {name: YARN, "text_config": {"max_position_embeddings": 256}}
    chosen, spec = resolved(path, hf_overrides=json.dumps(given) if as_text else given)
    found = read_config(path, chosen.engine.model.hf_overrides).model
    assert (found.attention.rope.kind, found.attention.rope.theta) == ("yarn", 1e6)
    assert found.max_position_embeddings == spec.max_position_embeddings == 256
    plain = read_config(path).model
    assert plain.attention.rope.kind == "default"
    angles = found.attention.rope.frequencies(64), plain.attention.rope.frequencies(64)
    assert not np.array_equal(*angles)


def test_overrides_are_joined() -> None:
    raw = {"a": {"b": 1, "c": 2}, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}, "d": 1}
    found = overridden(raw, {"a": {"b": None, "e": 3}, "rope_theta": 7.0, "d": None})
    assert found["a"] == {"b": None, "c": 2, "e": 3} and found["d"] is None
    assert found["rope_parameters"] == {"rope_theta": 7.0, "rope_type": "default"}


def test_a_section_of_another_kind_is_left_to_the_reader() -> None:
    raw = {"rope_parameters": {"rope_theta": 5.0}}
    assert overridden(raw, {"rope_theta": 7.0, "rope_scaling": "yarn"})["rope_parameters"] == "yarn"


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        ({"rope_scaling": YARN, "rms_norm_eps": 1e-5, "eos_token_id": 3, "head_dim": None}, ""),
        ({"text_config": {"dtype": "float32", "tie_word_embeddings": None}}, ""),
        ({"num_layers": 3, "rms_norm_eps": 1e-5}, "num_layers"),
        ({"a": {"b": 1, "c": {"d": None}}, "rope_parameters": {"rope_theta": 7.0}}, "a.b, a.c.d"),
        ({"text_config": {"n_ctx": 9}}, "n_ctx"),
    ],
)
def test_a_key_that_nothing_reads_is_named(
    path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], unread: str
) -> None:
    read_config(path, given).spec()
    assert [line for line in caplog.messages if "hf-overrides" in line] == (
        [f"hf-overrides: nothing reads {unread}"] if unread else []
    )


def test_a_bad_override_is_one_line(path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json with hf-overrides: num_hidden_layers is -1, but must be"):
        resolved(path, hf_overrides={"num_hidden_layers": -1})


def test_sampling_defaults(path: Path, tmp_path: Path) -> None:
    def found(**given: Any) -> dict[str, Any]:
        chosen, spec = resolved(path, **given)
        return serving_config(chosen.server, spec).default_sampling.given()

    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert found(override_generation_config='{"temperature": 0.25, "top_p": null}') == {"temperature": 0.25}
    assert found(generation_config=str(tmp_path)) == {"top_k": 5}
    assert found(generation_config="vllm", override_generation_config={"min_p": 0.5}) == {"min_p": 0.5}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    assert found(generation_config=str(tmp_path)) == {"temperature": 0.0}
    assert found(generation_config=str(tmp_path), override_generation_config={"temperature": 0.6}) == {
        "temperature": 0.6
    }
    with pytest.raises(ModelError, match=r"with override-generation-config: .*top_p"):
        found(override_generation_config={"top_p": 7})


def test_another_tokenizer_and_template_values(path: Path, tmp_path: Path) -> None:
    for file in path.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shown = CHAT_TEMPLATE + "{{ mood }}{{ enable_thinking }}"
    (tmp_path / "chat_template.jinja").write_text(shown)
    kwargs = {"mood": "calm", "enable_thinking": False}
    chosen, spec = resolved(path, tokenizer=str(tmp_path), default_chat_template_kwargs=kwargs)
    assert chosen.engine.model.tokenizer == str(tmp_path)
    prompter = Prompter.load(chosen.engine, serving_config(chosen.server, spec))
    messages = [{"role": "user", "content": "Hi"}]
    assert str(prompter.render(messages, {}).prompt).endswith("calmFalse")
    assert str(prompter.render(messages, {"mood": "glad"}).prompt).endswith("gladFalse")
    assert str(prompter.render(messages, {"reasoning_effort": "high"}).prompt).endswith("calmTrue")
    assert resolved(path, tokenizer="bundled")[1].tokenizer == str(BUNDLED)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hf_overrides": "{"}, "hf_overrides is {, but must be a mapping or JSON such as"),
        ({"hf_overrides": [1]}, "must be a mapping or JSON"),
        ({"override_generation_config": "5"}, "must be a mapping or JSON"),
        ({"default_chat_template_kwargs": "x"}, "must be a mapping or JSON"),
        ({"generation_config": "nowhere"}, "generation_config is nowhere, but must be auto, vllm or a folder with a"),
        ({"tokenizer": "."}, "tokenizer.json; give a model that has one"),
        ({"tokenizer": "~nobody-here/x"}, "~nobody-here/x does not exist; give an existing folder"),
    ],
)
def test_bad_values_are_one_line(path: Path, tmp_path: Path, given: dict[str, Any], words: str) -> None:
    given = {name: str(tmp_path) if value == "." else value for name, value in given.items()}
    with pytest.raises(PyptoError) as caught:
        resolved(path, **given)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_template_values_that_are_not_to_be_given(path: Path) -> None:
    chosen, spec = resolved(path, default_chat_template_kwargs={"messages": []})
    with pytest.raises(ConfigError, match="must not set messages"):
        Prompter.load(chosen.engine, serving_config(chosen.server, spec))
