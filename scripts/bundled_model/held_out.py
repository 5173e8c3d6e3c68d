"""Which questions are kept out of training, to be asked in the evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def percentile(text: str) -> int:
    """Return a number from 0 to 99 that the text fixes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100


def draw(rng: random.Random, make: Callable[[random.Random], T], key: Callable[[T], str], held_out: bool) -> T:
    """Make one thing on the wanted side of the split: a tenth of all keys is held out."""
    while True:
        made = make(rng)
        if (percentile(key(made)) < 10) == held_out:
            return made
