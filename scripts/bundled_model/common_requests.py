"""What people try first on a small model, practised more often than chance would ask it."""

from __future__ import annotations

import random

from . import arithmetic, odd_input
from .refusals import ONLY_COUNT, UNKNOWN
from .skills import Pair, hasty
from .words import NUMBER_WORDS, any_word

ENDS = [5, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 60, 99, 100, 100]


def common_request(rng: random.Random) -> Pair:
    """Return a count over a round range or beyond it, a sum in words, a comparison of equals, or one key held down."""
    kinds = [_count, _count_too_far, _sum_in_words, _equal, _key_held_down]
    return rng.choices(kinds, (6, 1, 5, 3, 2))[0](rng)


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


def _count_too_far(rng: random.Random) -> Pair:
    """Count to a round number that is too large."""
    frame = rng.choice(["Count to {0}.", "Count up to {0}.", "Count down from {0}.", "Count from 1 to {0}."])
    return hasty(rng, frame.format(rng.choice([101, 110, 120, 150, 200, 500, 1000, 1000, 10000, 1000000]))), ONLY_COUNT


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
    longest = rng.choice([12, 60, 60, 350])
    return piece * rng.randint(3, max(3, longest // len(piece))), UNKNOWN
