"""Tokenizer, incremental detokenisation and stop strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as RawTokenizer

from pypto_serving.engine.text import Detokenizer, StopStrings, Tokenizer, load_eos_token_ids
from pypto_serving.errors import ModelError, RequestError
from tests.api.checkpoint import TEXT, tiny_tokenizer, write_checkpoint

TOKENIZER = Tokenizer(tiny_tokenizer(), {"eos_token": "<|end|>"})
NUM_IDS = TOKENIZER.raw.get_vocab_size()


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


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "<0xE4>": 3, "<0xB8>": 4, "<0xAD>": 5, "!": 6}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return Tokenizer(raw)


def test_sentencepiece_spaces_and_byte_fallback() -> None:
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, [1, 2, 3, 4, 5, 6])) == "hello world中!"
    assert "".join(pieces(tokenizer, [2, 6], prompt=[1])) == " world!"
    assert [tokenizer.token_bytes(i) for i in (1, 3, 6)] == [b" hello", b"\xe4", b"!"]


@given(ids=st.lists(st.sampled_from([1, 2, 6, 345])))
def test_sentencepiece_pieces_join(ids: list[int]) -> None:
    tokenizer = metaspace()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_token_bytes_join_to_the_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_token_bytes_of_special_and_unknown_ids() -> None:
    assert TOKENIZER.token_bytes(TOKENIZER.raw.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(NUM_IDS + 7) == b""


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Whole-string search: the match that ends first, the longest of those."""
    found = [
        (at + len(stop), -len(stop), stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)
    ]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(chunks=st.lists(st.text("abc\n", max_size=5), max_size=20), stops=STOPS)
def test_stop_strings_in_any_pieces_equal_a_search_of_the_whole(chunks: list[str], stops: list[str]) -> None:
    matcher, whole = StopStrings(stops), "".join(chunks)
    out = ""
    for i, chunk in enumerate(chunks):
        out += matcher.push(chunk)
        so_far = "".join(chunks[: i + 1])
        if matcher.matched is None:
            held = so_far[len(out) :]
            assert out + held == so_far
            assert held == "" or any(stop.startswith(held) for stop in stops)
    out += matcher.flush()
    assert (out, matcher.matched) == search(whole, stops)


def test_text_after_a_stop_string_is_dropped() -> None:
    matcher = StopStrings(["STOP"])
    assert [matcher.push(piece) for piece in ("aS", "TO", "Pb", "c")] == ["a", "", "", ""]
    assert matcher.flush() == ""


def test_loading(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, None)
    assert load_eos_token_ids(tmp_path, tokenizer) == (0, 2)
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
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json holds a list"):
        load_eos_token_ids(tmp_path)


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
