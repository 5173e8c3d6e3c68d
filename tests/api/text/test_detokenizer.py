"""Incremental detokenisation: pieces join to the decoded output, and no character is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.text.detokenizer import Detokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.text.tokenizers import NUM_IDS, TOKENIZER, metaspace


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(
    ids=st.lists(st.integers(0, NUM_IDS + 50), max_size=80), prompt=st.lists(st.integers(0, NUM_IDS - 1), max_size=9)
)
def test_pieces_of_any_tokens_join_to_the_whole_text(ids: list[int], prompt: list[int]) -> None:
    assert "".join(pieces(TOKENIZER, ids)) == TOKENIZER.decode(ids)
    assert "".join(pieces(TOKENIZER, ids, skip=False)) == TOKENIZER.decode(ids, skip_special_tokens=False)
    if not TOKENIZER.decode(prompt).endswith("\ufffd"):
        assert TOKENIZER.decode(prompt) + "".join(pieces(TOKENIZER, ids, prompt)) == TOKENIZER.decode(prompt + ids)


@given(text=st.text(max_size=60))
def test_no_character_is_split(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(pieces(TOKENIZER, ids)) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces(TOKENIZER, ids))


def test_a_prompt_that_ends_within_a_character_does_not_leak_into_the_output() -> None:
    *prompt, last = TOKENIZER.encode("a中")
    assert pieces(TOKENIZER, [last, *TOKENIZER.encode("b")], prompt)[-1] == ""
    assert "".join(pieces(TOKENIZER, TOKENIZER.encode("b"), prompt)) == "b"


@pytest.mark.parametrize("token", ["Ģ", "ä", "<|end|>"])
def test_endless_undecodable_output_costs_the_same_per_token(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated lone bytes and skipped special tokens must not make every step decode all of them."""
    longest = 0
    decode = Tokenizer.decode

    def measure(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special_tokens)

    ids = [TOKENIZER.raw.token_to_id(token)] * 500
    whole = TOKENIZER.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", measure)
    assert "".join(pieces(TOKENIZER, ids)) == whole
    assert longest <= 64


def test_sentencepiece_spaces_and_byte_fallback() -> None:
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, [1, 2, 3, 4, 5, 6])) == "hello world中!"
    assert "".join(pieces(tokenizer, [2, 6], prompt=[1])) == " world!"


@given(ids=st.lists(st.sampled_from([1, 2, 6, 345])))
def test_sentencepiece_pieces_join(ids: list[int]) -> None:
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
