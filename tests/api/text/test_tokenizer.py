"""Tokenizer: loading, encoding, and the bytes of single tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from pypto_serving.api.text.files import eos_token_ids, read_generation_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from tests.api.checkpoint import TEXT, tiny_tokenizer, write_checkpoint
from tests.api.text.tokenizers import NUM_IDS, TOKENIZER, metaspace


@given(text=st.text(max_size=40))
def test_token_bytes_join_to_the_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_token_bytes_of_special_and_unknown_ids() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.raw.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(NUM_IDS + 7) == b""
    assert [metaspace().token_bytes(i) for i in (1, 3, 6)] == [b" hello", b"\xe4", b"!"]


def test_loading(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, None)
    assert eos_token_ids(read_generation_config(tmp_path)) == (0, 2)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_truncation_and_padding_of_the_checkpoint_are_off(tmp_path: Path) -> None:
    raw = tiny_tokenizer()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode(TEXT)) == TEXT


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    for damage in ("{", "[]", "", "\0", '{"a":' * 100_000):
        (tmp_path / "tokenizer.json").write_text(damage)
        with pytest.raises(ModelError, match=r"tokenizer\.json is damaged: .+; download the checkpoint again"):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: it is not a regular file$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").symlink_to("gone")
    with pytest.raises(ModelError, match=r"has no generation_config\.json"):
        eos_token_ids(read_generation_config(tmp_path))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json holds a JSON list"):
        eos_token_ids(read_generation_config(tmp_path))


@pytest.mark.parametrize(
    ("config", "around"),
    [
        ({}, (1, 2)),
        ({"add_bos_token": True}, (1, 0)),
        ({"add_bos_token": False}, (0, 0)),
        ({"add_bos_token": True, "add_eos_token": True}, (1, 1)),
    ],
)
def test_bos_and_eos_follow_the_configuration(tmp_path: Path, config: dict[str, bool], around: tuple[int, int]) -> None:
    raw = tiny_tokenizer()
    bos, eos = "<|im_start|>", "<|end|>"
    raw.add_special_tokens([AddedToken(bos), AddedToken(eos)])
    raw.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos} {eos}", special_tokens=[(bos, 1), (eos, 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": bos, "eos_token": {"content": eos}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | config))
    tokenizer = Tokenizer.load(tmp_path)
    inner = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [1] * around[0] + inner + [0] * around[1]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        TOKENIZER.encode("\ud800")


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [({"eos_token_id": [5, 3, 5]}, (7,), (3, 5)), ({"eos_token_id": []}, (7,), ()), ({}, (7,), (7,)), ({}, (), ())],
)
def test_eos_ids_of_the_generation_config_come_first(
    tmp_path: Path, generation: dict[str, Any], config: tuple[int, ...], ids: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(read_generation_config(tmp_path), config) == ids


@pytest.mark.parametrize("value", ["end", [1, "2"], True, 1.5])
def test_eos_ids_that_are_no_numbers_are_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is .*, but must be whole numbers"):
        eos_token_ids(read_generation_config(tmp_path))
