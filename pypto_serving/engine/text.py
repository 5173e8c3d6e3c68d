"""Text in, text out: the checkpoint's tokenizer, incremental detokenisation and stop strings.

Loading reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and `config.json`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors
from tokenizers.decoders import DecodeStream

from pypto_serving.errors import ModelError, RequestError

REPLACEMENT = "\ufffd"
LONG_TEXT_CHARS = 16_384
WHOLE_TEXTS = 16_384
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's JSON file, {} where there is no such file; raises ModelError if damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; download the checkpoint again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__} instead of an object; download the checkpoint again")
    return value


def load_special_tokens(model_dir: str | Path) -> dict[str, str]:
    """Named special tokens of a checkpoint, such as {"bos_token": "<s>"}; absent ones are left out."""
    path = Path(model_dir)
    sources = (
        read_json_object(path / "special_tokens_map.json"),
        read_json_object(path / "tokenizer_config.json"),
    )
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def load_eos_token_ids(model_dir: str | Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Ids that end an output: of generation_config.json, else config.json, and the tokenizer's eos_token."""
    path = Path(model_dir)
    declared = read_json_object(path / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = read_json_object(path / "config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    found = {i for i in ids if type(i) is int}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


class Tokenizer:
    """A checkpoint's tokenizer. Does not change after loading, so any thread may use it."""

    def __init__(self, raw: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.special_tokens = special_tokens or {}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        decoder = raw.decoder.__getstate__() if raw.decoder is not None else b""
        self._bytes_of = _byte_alphabet() if b'"ByteLevel"' in decoder else None
        self._joins_bytes = decoder != b"" and json.loads(decoder)["type"] == "ByteLevel"
        self.whole_text = functools.lru_cache(WHOLE_TEXTS)(self._whole_text)

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read a checkpoint's tokenizer; raises ModelError where tokenizer.json is missing or damaged."""
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} does not exist: this checkpoint has no fast tokenizer; add its tokenizer.json")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}; download the checkpoint again") from error
        special = load_special_tokens(model_dir)
        _apply_bos_eos(raw, read_json_object(Path(model_dir) / "tokenizer_config.json"), special)
        return cls(raw, special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, what the checkpoint puts around a sequence too.

        Raises RequestError for text that is not valid Unicode.
        """
        try:
            ids: list[int] = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode; remove it") from error
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but long texts are encoded in a thread, outside the interpreter lock."""
        if len(text) < LONG_TEXT_CHARS:
            return self.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary have none."""
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that a token stands for, alone: part of a character for some, b"" for unknown ids."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.raw.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char) or char.encode() for char in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def _whole_text(self, token_id: int) -> str | None:
        """The text of a token that is made of whole characters, so that it is the same beside any others; else None.

        `whole_text` is this with a memory. Only byte-level decoders join tokens without looking at their neighbours.
        """
        text = self.raw.decode([token_id], skip_special_tokens=False) if self._joins_bytes else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.raw.token_to_id(token)


def _apply_bos_eos(raw: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Follow `add_bos_token` / `add_eos_token`, which overrule the post-processor of tokenizer.json as in HF."""
    if not isinstance(config.get("add_bos_token", config.get("add_eos_token")), bool):
        return
    around = {}
    for side in ("bos", "eos"):
        token = special.get(f"{side}_token") if config.get(f"add_{side}_token") else None
        token_id = None if token is None else raw.token_to_id(token)
        if token is not None and token_id is not None:
            around[side] = (token, token_id)
    pieces = [around[s][0] if s in around else s for s in ("bos", "$A", "eos") if s == "$A" or s in around]
    raw.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(around.values()))


def _byte_alphabet() -> dict[str, bytes]:
    """Byte-level BPE's printable stand-ins: bytes that are printable in Latin-1 keep their character, the
    others take U+0100 upwards in order (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)})
    return alphabet


class Detokenizer:
    """Turns one output's token ids into text as they come. Owned by the request whose output it is.

    The pieces of `push` and `flush`, joined, are the decoded output; a character is never split, an incomplete
    one is held back. The cost of a token does not grow with the output: a run without a clean end longer than
    `HELD_LIMIT` tokens is decoded in a window that gives out all but the last three undecodable places.
    """

    CONTEXT = 6
    HELD_LIMIT = 16
    WINDOW = 16
    __slots__ = ("_context", "_held", "_shown", "_silent", "_skip_special", "_stream", "_tokenizer", "_whole_text")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        self._skip_special = skip_special_tokens
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[int] = []
        self._held: list[int] = []
        self._shown = 0
        self._stream: DecodeStream | None = None
        context = list(prompt_ids[-self.CONTEXT :])
        self._restart([] if self._decode(context).endswith(REPLACEMENT) else context)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" for a part of a character."""
        if token_id in self._silent:
            return ""
        if not self._held and (whole := self._whole_text(token_id)) is not None:
            return whole
        self._held.append(token_id)
        if self._stream is None:
            return self._push_in_window()
        try:
            text = self._stream.step(self._tokenizer.raw, token_id)
        except Exception:  # DecodeStream refuses decoders that change text already given out
            text = None
            self._stream = None
        if text is not None:
            self._context, self._held = self._held, []
            return text
        if len(self._held) >= self.HELD_LIMIT or self._stream is None:
            self._stream = None
            return self._push_in_window()
        return ""

    def flush(self) -> str:
        """What is still held back, at the end of the output; incomplete characters become U+FFFD."""
        text = self._held_text()[self._shown :] if self._held else ""
        self._restart([])
        return text

    def _restart(self, context: list[int]) -> None:
        self._context = context
        self._held = []
        self._shown = 0
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special)

    def _push_in_window(self) -> str:
        text = self._held_text()
        end = _certain_chars(text)
        new, self._shown = text[self._shown : end], max(self._shown, end)
        if end == len(text):
            self._restart((self._context + self._held)[-self.WINDOW :])
        elif len(self._held) > 2 * self.WINDOW:
            self._context, self._held = [], self._held[-self.WINDOW :]
            self._shown = _certain_chars(self._decode(self._held))
        return new

    def _held_text(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special) if ids else ""


def _certain_chars(text: str) -> int:
    """How many characters of decoded `text` no later token can change: at most three bytes await their rest."""
    undecodable = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(undecodable, 3)


class StopStrings:
    """Finds the first of several stop strings in a text that comes in pieces. Owned by one output.

    The match that ends first wins, the longest of those that end there, whatever the pieces are. Text is held
    back only while it could still become a stop string. `matched` is the string found; later text is dropped.
    """

    __slots__ = ("_held", "_patterns", "_states", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _failure_table(stop)) for stop in sorted(stops, key=len, reverse=True)]
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of all text so far that is new and cannot belong to a stop string."""
        if self.matched is not None:
            return ""
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            self.matched = self._advance(char)
            if self.matched is not None:
                return self._release(end - len(self.matched))
        return self._release(len(self._held) - max(self._states, default=0))

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _advance(self, char: str) -> str | None:
        """Move every pattern's automaton (Knuth, Morris, Pratt 1977) by one character."""
        states, found = self._states, None
        for i, (pattern, failure) in enumerate(self._patterns):
            state = states[i]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
            states[i] = state
            if state == len(pattern) and found is None:
                found = pattern
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
