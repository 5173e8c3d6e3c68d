"""Tokenizers of GGUF files: SentencePiece's joins as an independent loop makes them, ids of tokens that end a turn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from pypto_serving.errors import ModelError
from pypto_serving.model.gguf.tokenizer import write_tokenizer

LETTERS = "abc▁"


def keys(tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    given = {"model": "llama", "tokens": tokens, "token_type": types} | more
    return {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in given.items()}


def sentence_piece(**more: Any) -> dict[str, Any]:
    """A vocabulary of single letters, bytes and random joins with random scores."""
    rng = np.random.default_rng(0)
    joins: list[str] = []
    while len(joins) < 60:
        known = [*LETTERS, *joins]
        joined = str(rng.choice(known)) + str(rng.choice(known))
        if joined not in known and len(joined) < 8:
            joins.append(joined)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *joins]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(LETTERS) + len(joins))]
    scores = [0.0] * 259 + rng.permutation(len(LETTERS) + len(joins)).astype(float).tolist()
    return keys(tokens, types, scores=scores, bos_token_id=1, eos_token_id=2, **more)


def joined(metadata: dict[str, Any], text: str) -> list[str]:
    """Join the neighbours whose token has the best score, until there are none."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def written(tmp_path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    ids = write_tokenizer(metadata, Path("model.gguf"), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json")), config, ids


def test_sentence_piece(tmp_path: Path) -> None:
    metadata, rng = sentence_piece(), np.random.default_rng(1)
    tokenizer, config, ids = written(tmp_path, metadata)
    assert config["bos_token"] == "<s>" and ids == {"bos_token_id": 1, "eos_token_id": [2]}
    for _ in range(500):
        text = "".join(rng.choice(list("abc "), rng.integers(1, 30)))
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<s>", *joined(metadata, text)]
        assert tokenizer.decode(encoding.ids) == text
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]


def test_switches(tmp_path: Path) -> None:
    tokenizer, config, _ = written(
        tmp_path, sentence_piece(add_space_prefix=False, add_bos_token=False, chat_template="{{ 1 }}")
    )
    assert tokenizer.encode("a").tokens == ["a"]
    assert config["chat_template"] == "{{ 1 }}"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_splits(tmp_path: Path, pre: str) -> None:
    """Without merges a token is a byte; with one merge of digits, only what is not split apart before can join."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = keys([*alphabet, "12", "<|im_end|>"], [1] * 257 + [3], model="gpt2", pre=pre, merges=["1 2"])
    tokenizer, _, ids = written(tmp_path, metadata)
    single = pre in ("smollm", "qwen2", "tekken")
    assert tokenizer.encode("12").tokens == (["1", "2"] if single else ["12"])
    assert ids["eos_token_id"] == [257]
    text = "Hé, it's 12 o'clock:\n\n  \t«ok» 日本 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": [1, 2]},
        {"token_type": [1]},
        {"scores": None},
        {"scores": ["a"]},
        {"model": "gpt2", "merges": ["a q"]},
        {"model": "gpt2", "merges": None},
        {"tokens": ["a" * 100_000] * 323},
    ],
)
def test_damage(tmp_path: Path, changes: dict[str, Any]) -> None:
    metadata = sentence_piece() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml"):
        write_tokenizer(metadata, Path("model.gguf"), tmp_path)


def byte_level(*tokens: str, kind: int = 3, **more: Any) -> dict[str, Any]:
    """All bytes, and special tokens in front of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return keys([*tokens, *alphabet], [kind] * len(tokens) + [1] * 256, model="gpt2", **more)


@pytest.mark.parametrize("token", ["<s>", "begin of text $A:1", "$A"])
@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_begin_of_text(tmp_path: Path, token: str, more: dict[str, Any], begins: bool) -> None:
    tokenizer, _, _ = written(tmp_path, byte_level(token, bos_token_id=0, **more))
    assert tokenizer.encode("hi").tokens == [token] * begins + ["h", "i"]


@pytest.mark.parametrize("kind", [3, 4])
def test_ends_of_turns(tmp_path: Path, kind: int) -> None:
    _, _, ids = written(tmp_path, byte_level("<|im_end|>", "<|end_of_text|>", "<|other|>", kind=kind))
    assert ids["eos_token_id"] == [0, 1]


def test_thousands_of_special_tokens(tmp_path: Path) -> None:
    tokens = [f"<|{i}|>" for i in range(10_000)]
    tokenizer, _, _ = written(tmp_path, byte_level(*tokens))
    assert tokenizer.encode("<|7|><|9999|>").ids == [7, 9999]
