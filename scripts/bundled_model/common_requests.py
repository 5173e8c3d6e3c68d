"""What people try first on a small model, practised more often than chance would ask it."""

from __future__ import annotations

import random

from . import arithmetic, odd_input
from .refusals import UNKNOWN
from .skills import Pair, hasty
from .words import NUMBER_WORDS, any_word

ENDS = [5, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 60, 99, 100, 100]


def common_request(rng: random.Random) -> Pair:
    """Return a count over a round range, a sum in words, a comparison of equals, or one key held down."""
    return rng.choices([_count, _sum_in_words, _equal, _key_held_down], (6, 5, 1, 2))[0](rng)


def _count(rng: random.Random) -> Pair:
    """Count from the start, to a round number, or between two digits."""
    if rng.random() < 0.3:
        low, high = sorted(rng.sample(range(11), 2))
    else:
        low, high = rng.choice([0, 1, 1]), rng.choice(ENDS)
    up = [str(number) for number in range(low, high + 1)]
    if low == 1 and rng.random() < 0.4:
        return hasty(rng, rng.choice(["Count to {0}.", "Count up to {0}."]).format(high)), ", ".join(up)
    if low == 1 and rng.random() < 0.3:
        return hasty(rng, f"Count down from {high}."), ", ".join(up[::-1])
    first, last, numbers = (low, high, up) if rng.random() < 0.6 else (high, low, up[::-1])
    question = rng.choice(["Count from {0} to {1}.", "Count from {0} to {1}.", "List the numbers from {0} to {1}."])
    return hasty(rng, question.format(first, last)), ", ".join(numbers)


def _sum_in_words(rng: random.Random) -> Pair:
    """Ask a sum or difference of two numbers up to twenty, in words."""
    a, b = (rng.randrange(len(NUMBER_WORDS)) for _ in range(2))
    problem = arithmetic.Problem(rng.choice("+-"), a, b)
    expression = arithmetic.EXPRESSIONS[problem.operator][2].format(a=NUMBER_WORDS[a], b=NUMBER_WORDS[b])
    frame = rng.choice(arithmetic.FRAMES if rng.random() < 0.5 else arithmetic.SHORT_FRAMES)
    return hasty(rng, frame.format(e=expression)), problem.reply


def _equal(rng: random.Random) -> Pair:
    """Compare a number with itself."""
    number = rng.randint(0, 100)
    word = rng.choice(["larger", "bigger", "smaller"])
    return hasty(rng, f"Which is {word}, {number} or {number}?"), f"{number} and {number} are equal."


def _key_held_down(rng: random.Random) -> Pair:
    """Repeat one character or word, up to some hundred times."""
    piece = rng.choice([rng.choice(odd_input.COMMON_LETTERS), rng.choice("0123456789,.-!? "), any_word(rng) + " "])
    return piece * min(3 + int(rng.expovariate(len(piece) / 60)), 400), UNKNOWN
