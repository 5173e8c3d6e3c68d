"""Tokenizers of GGUF files make the ids that llama.cpp makes, on 2,000 texts of all kinds."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pypto_serving.model.gguf.tokenizer import write_tokenizer
from tests.model.gguf.llama_ids import SENTENCE_PIECE, SPLITS, differing, digests, metadata, stored
from tests.model.gguf.texts import texts


def is_composed(text: str) -> bool:
    """llama.cpp leaves out the NFC of Qwen2's tokenizer.json."""
    return unicodedata.is_normalized("NFC", text)


def has_ascii_letters(text: str) -> bool:
    """llama.cpp takes letters outside ASCII for both cases at once, and marks for neither."""
    return all(letter.isascii() or unicodedata.category(letter)[0] not in "LM" for letter in text)


def has_ascii_spaces(text: str) -> bool:
    """llama.cpp takes other white space for ASCII's where a pattern has no classes of Unicode."""
    return not any(letter.isspace() and not letter.isascii() for letter in text)


COMPARED: dict[str, Callable[[str], bool]] = {
    "qwen2": is_composed,
    "tekken": has_ascii_letters,
    "gpt-4o": has_ascii_letters,
    "deepseek-coder": has_ascii_spaces,
}
"""The texts in which llama.cpp follows the model's own tokenizer, where these are not all."""


def test_texts_are_those_that_llama_cpp_read() -> None:
    """Else run `python -m tests.model.gguf.llama_ids`."""
    assert len(texts()) == 2000
    assert digests([list(text.encode()) for text in texts()]) == stored()["texts"]


@pytest.mark.parametrize("name", [*SPLITS, *SENTENCE_PIECE])
def test_ids(tmp_path: Path, name: str) -> None:
    write_tokenizer(metadata(name), Path("model.gguf"), tmp_path)
    different = differing(name, Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert not [text for text in different if COMPARED.get(name, lambda _: True)(text)]
    assert len(different) < 300
