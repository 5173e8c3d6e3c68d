"""Input that nobody would type on purpose, and that must not make a reply run on without an end."""

from __future__ import annotations

import random
import string

from .refusals import UNKNOWN
from .skills import Pair
from .words import EMOJI, any_word, phrases

COMMON_LETTERS = "abcdefghijklmnopqrstuvwxyzAHXZ"
SALAD = phrases(
    "what|is|the|count|from|to|spell|say|and|hello|hi|Hello|plus|minus|backwards|,|?|please|reverse|repeat|number|list|all"
    "|my|name|how|many|letters|in|after|before|down|up|even|odd|larger|capital|write|day|month|word|add|that|sure"
)
FRAGMENTS = [
    "",
    " ",
    "\n",
    "\n\n\n",
    *phrases("[1, 2, 3]|{}|()|...|10:30|https://example.com/a?b=1|a@example.com|$5"),
    *phrases("Count|Count from|Count to|Spell|Spell backwards|Say|Repeat|Reverse|What is|What comes after"),
    *phrases("Add|Subtract|Which is larger?|Letters|The alphabet backwards|My name is|</s>|null|True"),
]


def odd(rng: random.Random) -> Pair:
    """Return what nobody would ask: repetitions, lists, random characters, parts of questions, or nothing at all."""
    return rng.choice([_run, _list, _characters, _salad, _fragment])(rng), UNKNOWN


def _length(rng: random.Random) -> int:
    """Return a number from 1, mostly small, sometimes hundreds."""
    return min(int(rng.expovariate(1 / rng.choice([4, 12, 12, 60]))) + 1, 400)


def _run(rng: random.Random) -> str:
    """Return one character or one word, over and over."""
    if rng.random() < 0.5:
        return rng.choice([rng.choice(COMMON_LETTERS), rng.choice(",.;:!?#-+=/_ "), rng.choice(EMOJI)]) * _length(rng)
    word = rng.choice([any_word(rng), rng.choice(SALAD)])
    return rng.choice([" ", ", ", "\n", ","]).join([word] * (3 + _length(rng) // 2))


def _list(rng: random.Random) -> str:
    """Return numbers in a row, or one far too long."""
    if rng.random() < 0.2:
        digits = string.digits if rng.random() < 0.5 else rng.choice(string.digits)
        return "".join(rng.choices(digits, k=3 + _length(rng)))
    first = rng.randint(0, 99)
    count = range(3 + _length(rng) // 3)
    numbers = [str(first + i if first % 2 else rng.randint(0, 99)) for i in count]
    return rng.choice([" ", ", ", ",", "\n"]).join(numbers) + rng.choice(["", ","])


def _characters(rng: random.Random) -> str:
    """Return random characters of ASCII or of other scripts."""
    if rng.random() < 0.5:
        return "".join(chr(rng.randint(33, 126)) for _ in range(4 + _length(rng)))
    others = (rng.choice([rng.randint(161, 0x7FF), rng.randint(0x3041, 0x9FFF)]) for _ in range(1 + _length(rng) // 4))
    return "".join(map(chr, others))


def _salad(rng: random.Random) -> str:
    """Return words of other questions in no order."""
    count = rng.randint(5, 20)
    return " ".join(rng.choice([rng.choice(SALAD), any_word(rng), str(rng.randint(0, 120))]) for _ in range(count))


def _fragment(rng: random.Random) -> str:
    """Return a part of a question, or something else that asks nothing."""
    return rng.choice(FRAGMENTS)
