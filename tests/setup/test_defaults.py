"""Defaults stand in one place: what `--help` says is what resolve() decides."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.kernels.abi import INSTRUCTION_SETS
from pypto_serving.model.null_models import NULL_MODELS, null_spec
from pypto_serving.setup.option_table import DEFAULTS, QUIET_DEFAULTS, RULES, TABLE
from pypto_serving.setup.options import Options
from pypto_serving.setup.prepare import model_spec
from pypto_serving.setup.resolver import resolve
from pypto_serving.setup.rules import KERNELS
from pypto_serving.types.config import EngineConfig, FaultConfig, ServerConfig, default_of
from tests.setup.small import HOST, make_model, make_resolved, setting

SHOWN = {row.name: row.help_text for row in TABLE}


def test_every_flag_says_its_default() -> None:
    assert all(text.endswith(")") and " (default: " in text for text in SHOWN.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "(default: 8000)"),
        ("drain_timeout", "(default: 30)"),
        ("kv_disk_size", "(default: 16GiB)"),
        ("max_body_bytes", "(default: 64MiB)"),
        ("chunked_prefill", "(default: on)"),
        ("max_num_seqs", "(default: 256)"),
        ("block_size", "(default: 32; with --kv-remote as many as make 256 KiB)"),
        ("backend", "cpu, npu, cuda or null (no model, for tests). (default: cpu)"),
        ("kernels", "avx512_bf16, avx512_vnni, avx512, avx2 or portable; or torch, without kernels."),
    ],
)
def test_help_texts(name: str, text: str) -> None:
    assert text in SHOWN[name]


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - {"dtype", "block_size", "kv_host_memory"}))
def test_fixed_defaults_are_what_is_resolved(name: str) -> None:
    """Block size and dtype are read with the model's files."""
    value, reason = setting(make_resolved(), name.replace("_", "-"))
    assert value == {"kv_disk_size": "16 GiB", "max_body_bytes": "64 MiB"}.get(name, DEFAULTS[name])
    assert "default" in reason


def test_fixed_defaults_pass_their_own_rules() -> None:
    for name, value in DEFAULTS.items():
        if value is not False:
            assert RULES[name].parse(value) == value


def test_a_command_may_change_defaults_and_the_user_still_wins() -> None:
    from pypto_serving.setup.options import make_options

    def level(**options: Any) -> Any:
        resolved = resolve(make_options({}, options, "c.yaml"), make_model(), HOST, QUIET_DEFAULTS)
        return resolved.engine.log_level, setting(resolved, "log-level")[1]

    assert level() == ("warning", "default")
    assert level(log_level="debug") == ("debug", "given in c.yaml")


def test_a_field_without_a_default_has_none_to_give() -> None:
    assert default_of(FaultConfig, "step_timeout_s") == FaultConfig().step_timeout_s
    assert default_of(ServerConfig, "port") == 8000
    for name in ("model", "no_such_field"):
        with pytest.raises(KeyError, match=name):
            default_of(EngineConfig, name)


@pytest.mark.parametrize(("model", "reason"), [("plain", "default"), ("deepseek_v4", "of the first KV group")])
def test_block_size_without_a_model(model: str, reason: str) -> None:
    options = Options(backend="null", model=model)
    size, why = setting(resolve(options, model_spec(options), HOST), "block-size")
    assert why.startswith(reason) and (size == DEFAULTS["block_size"]) is (model == "plain")


def test_names_are_the_same_everywhere() -> None:
    assert ("auto", *INSTRUCTION_SETS, "torch") == KERNELS
    assert all(pkgutil.resolve_name(defaults.target) for defaults in BACKEND_DEFAULTS.values())
    assert [null_spec(name).architecture for name in NULL_MODELS] == ["Null", "Null"]
