"""Follow texts and random walks through grammars, a token for each byte."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pypto_serving.api.grammars.json_schema import prepare
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.guidance import Compiler, GrammarError, Matcher, checked
from pypto_serving.types.guide import Grammar

COMPILER = Compiler.of_bytes()
END = COMPILER._tokenizer.eos_token


def matcher_of(schema: Mapping[str, Any]) -> Matcher:
    """A matcher for JSON of a schema, as requests get it. Raises SchemaError or GrammarError."""
    return COMPILER.compile(checked(Grammar("json_schema", json.dumps(prepare(schema, json_options())))))


def copied(matcher: Matcher) -> Matcher:
    """A matcher in the same state."""
    return Matcher(matcher._raw.deep_copy())


def allowed(matcher: Matcher) -> list[int]:
    mask = np.zeros(COMPILER.num_words, np.uint32)
    matcher.fill(mask)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def accepts(matcher: Matcher, text: str | Sequence[int]) -> bool:
    """Whether an output may be `text`, and end."""
    matcher = copied(matcher)
    try:
        for token_id in text.encode() if isinstance(text, str) else text:
            matcher.consume(token_id)
    except GrammarError:
        return False
    return bool(matcher._raw.is_accepting())


def walk(matcher: Matcher, rng: random.Random, liked: bytes, most: int = 2000) -> str | None:
    """Return an output that likes some bytes, and closes after a while what it opened; None if it does not end."""
    matcher, text = copied(matcher), bytearray()
    for i in range(most):
        ids = allowed(matcher)
        if END in ids and (len(ids) == 1 or rng.random() < 0.3):
            return text.decode()
        ids = [byte for byte in ids if byte != END]
        closing = [byte for byte in ids if byte in b'"}]'] if i > most // 4 else []
        special = [byte for byte in ids if byte in liked] if rng.random() < 0.6 else []
        plain = [byte for byte in ids if 32 <= byte < 127]
        token_id = rng.choice(closing or special or plain or ids)
        matcher.consume(token_id)
        text.append(token_id)
    return None
