"""Encode text with a checkpoint's tokenizer and decode whole sequences."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from pypto_serving.api.text.files import has_tokenizer, load_special_tokens, read_optional_json
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.guidance import VocabularyBytes
from pypto_serving.util import read_regular

REPLACEMENT = "\ufffd"
WHOLE_TEXTS = 16_384
Split = Callable[[str], list[str | int]]
"""Splits a text into the ids of the special tokens in it and the texts between them."""


class Tokenizer:
    """Encodes and decodes with a checkpoint's tokenizer. Immutable after loading, so any thread may use it."""

    def __init__(self, raw: tokenizers.Tokenizer, special_tokens: dict[str, str] | None = None) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.special_tokens = special_tokens or {}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes = VocabularyBytes(raw)
        decoder = raw.decoder.__getstate__() if raw.decoder is not None else b""
        self._joins_bytes = decoder != b"" and json.loads(decoder)["type"] == "ByteLevel"
        self.whole_text = functools.lru_cache(WHOLE_TEXTS)(self._whole_text)

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read a checkpoint's tokenizer. Raises ModelError if tokenizer.json is missing, damaged or cannot be read."""
        path = Path(model_dir) / "tokenizer.json"
        if not has_tokenizer(model_dir):
            raise ModelError(f"{path} does not exist: this checkpoint has no fast tokenizer; add its tokenizer.json")
        try:
            raw = tokenizers.Tokenizer.from_buffer(read_regular(path))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} is damaged: {error}; download the checkpoint again") from error
        special = load_special_tokens(model_dir)
        _apply_bos_eos(raw, read_optional_json(Path(model_dir) / "tokenizer_config.json"), special)
        return cls(raw, special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; `add_special_tokens` adds the checkpoint's BOS, EOS and the like.

        Raises RequestError if the text is not valid Unicode.
        """
        try:
            ids: list[int] = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode; remove it") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids outside the vocabulary have no text."""
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, text: str) -> bool:
        """Return whether `text` is a special token, which decoding leaves out."""
        return self.special_id(text) is not None

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token `text`, or None if it is not a special token."""
        token_id = self.raw.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    @property
    def kind(self) -> str:
        """Name the kind of tokenizer, for people."""
        name = type(self.raw.model).__name__
        return f"{'byte-level' if self._joins_bytes else 'SentencePiece'} BPE" if name == "BPE" else name

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self.raw.get_vocab_size()

    @functools.cached_property
    def split_special(self) -> Split:
        """Split a text at the special tokens."""
        added = self.raw.get_added_tokens_decoder()
        return split_at({token.content: i for i, token in added.items() if token.special})

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be part of a character; b"" for unknown ids."""
        return self._token_bytes.bytes_of(token_id)

    def _whole_text(self, token_id: int) -> str | None:
        """Return the text of a token that consists of whole characters; None for other tokens.

        Such a text does not depend on neighbouring tokens, provided that the decoder only joins bytes. `whole_text`
        caches this method.
        """
        text = self.raw.decode([token_id], skip_special_tokens=False) if self._joins_bytes else REPLACEMENT
        return None if REPLACEMENT in text else text

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.raw.token_to_id(token)


def split_at(special: Mapping[str, int]) -> Split:
    """Return a function that splits texts at the special tokens `special`, given as text to id."""
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    texts = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    return lambda text: [special.get(part, part) for part in texts.split(text) if part]


def _apply_bos_eos(raw: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Apply `add_bos_token` and `add_eos_token`; as in Hugging Face they override tokenizer.json's post-processor."""
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
