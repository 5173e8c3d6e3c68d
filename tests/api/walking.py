"""Random texts of a grammar, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from pypto_serving.errors import RequestError
from pypto_serving.guidance import Compiler, Matcher
from pypto_serving.types.guide import Grammar

END = 256
TEMPTING = (
    *("</parameter>", "\n</parameter>", "</｜DSML｜parameter>", "</", "<", '"', "\\", "\n", "\x1c"),
    *("null", "True", "12", "[", "{"),
)
"""What texts hardly have by chance, but what may end them or be read as something else."""
FREE = 80
"""From so many printable characters on, text is free."""


def allowed(matcher: Matcher, compiler: Compiler) -> list[int]:
    mask = np.zeros(compiler.num_words, np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def printable(ids: list[int]) -> list[int]:
    """Ids of printable bytes and ends; of other bytes only if there is nothing else."""
    return [i for i in ids if i >= END or 32 <= i < 127 or i == 10] or ids


def after(matcher: Matcher, word: str) -> Matcher | None:
    """The matcher behind `word`; None if it does not match."""
    trial = Matcher(matcher._raw.deep_copy())
    try:
        for byte in word.encode():
            trial.consume(byte)
    except RequestError:
        return None
    return trial


def walk(
    compiler: Compiler, grammar: Grammar, rng: random.Random, words: Sequence[str] = TEMPTING, most: int = 2500
) -> str | None:
    """A random text with some of `words` where text is free, and soon an end of it; None if it does not end."""
    matcher, text = compiler.compile(grammar), bytearray()
    while not matcher.is_complete:
        choices = printable(allowed(matcher, compiler))
        if choices[-1] >= END and rng.random() < (0.6 if len(choices) < FREE else 0.05):
            break
        choices = [i for i in choices if i < END]
        if len(text) > most:
            return None
        if len(choices) > FREE and rng.random() < 0.4:
            word = rng.choice(words)
            if (found := after(matcher, word)) is not None:
                matcher = found
                text += word.encode()
                continue
        closing = [i for i in choices if chr(i) in '"}<]\n)/>']
        token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        matcher.consume(token)
        text.append(token)
    return text.decode(errors="replace")
