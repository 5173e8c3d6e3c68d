"""Sums and differences of numbers from 0 to 99: phrasings, answers and the held-out problems."""

from __future__ import annotations

import hashlib
import random
import re
from typing import NamedTuple

from .words import NUMBER_WORDS

LARGEST = 99
HELD_OUT_PERCENT = 15

EXPRESSIONS = {
    "+": ["{a}+{b}", "{a} + {b}", "{a} plus {b}"],
    "-": ["{a}-{b}", "{a} - {b}", "{a} minus {b}"],
}
SHORT_FRAMES = ["What is {e}?", "{e}", "{e} =", "{e}=", "{e}?", "{e} = ?"]
FRAMES = [
    "What is {e}?",
    "What's {e}?",
    "Calculate {e}.",
    "Compute {e}.",
    "How much is {e}?",
    "Solve {e}.",
    "Work out {e}.",
    "Tell me {e}.",
    "Please calculate {e}.",
    "What does {e} equal?",
    "What do you get for {e}?",
    "Can you tell me what {e} is?",
    "Do you know {e}?",
    "I need {e}.",
    "What is the result of {e}?",
    "What is the value of {e}?",
    "Give me the answer to {e}.",
]
FOLLOW_UP_FRAMES = [
    "And {e}?",
    "and {e}",
    "Now {e}.",
    "What about {e}?",
    "Then {e}?",
    "OK, and {e}?",
    "Next: {e}",
]
WHOLE_PHRASES = {
    "+": [
        "Add {a} and {b}.",
        "Add {a} to {b}.",
        "What is the sum of {a} and {b}?",
        "The sum of {a} and {b}?",
        "What do {a} and {b} make?",
        "How much are {a} and {b} together?",
        "I have {a} apples and get {b} more. How many do I have?",
    ],
    "-": [
        "Subtract {b} from {a}.",
        "What is the difference between {a} and {b}?",
        "Take {b} away from {a}.",
        "What is {a} take away {b}?",
        "What is {a} less {b}?",
        "How much is {a} without {b}?",
    ],
}


class Problem(NamedTuple):
    """One sum or difference, in the order in which its answer restates it."""

    operator: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """The right answer."""
        return self.a + self.b if self.operator == "+" else self.a - self.b

    @property
    def reply(self) -> str:
        """What the model is taught to say."""
        return f"{self.a} {self.operator} {self.b} = {self.result}"


def is_held_out(problem: Problem) -> bool:
    """Say whether the problem is kept out of training.

    Both orders of a sum always go together, and problems of two single digits are never held out.
    """
    if max(problem.a, problem.b) <= 9:
        return False
    low, high = sorted((problem.a, problem.b)) if problem.operator == "+" else (problem.a, problem.b)
    digest = hashlib.sha256(f"{low} {problem.operator} {high}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


NUMBERS = range(LARGEST + 1)
PROBLEMS = [Problem(op, a, b) for op in "+-" for a in NUMBERS for b in NUMBERS]


def all_problems(held_out: bool) -> list[Problem]:
    """List every problem on one side of the split."""
    return [p for p in PROBLEMS if is_held_out(p) == held_out]


def ask(rng: random.Random, problem: Problem, follow_up: bool = False) -> str:
    """Phrase a problem as a question."""
    a, b = str(problem.a), str(problem.b)
    if max(problem.a, problem.b) < len(NUMBER_WORDS) and rng.random() < 0.15:
        a, b = NUMBER_WORDS[problem.a], NUMBER_WORDS[problem.b]
    if rng.random() < 0.2:
        return rng.choice(WHOLE_PHRASES[problem.operator]).format(a=a, b=b)
    expressions = EXPRESSIONS[problem.operator]
    expression = (expressions[2] if a.isalpha() else rng.choice(expressions)).format(a=a, b=b)
    frames = FOLLOW_UP_FRAMES if follow_up and rng.random() < 0.4 else FRAMES
    if frames is FRAMES and rng.random() < 0.5:
        frames = SHORT_FRAMES
    frame = rng.choice(frames)
    return frame.format(e=expression)


def change_of_result(rng: random.Random, result: int) -> tuple[str, Problem]:
    """Return a question that changes the previous result ("Add 5 to that."), and the problem it poses."""
    problem = Problem(rng.choice("+-"), result, rng.randint(0, LARGEST if rng.random() < 0.5 else 9))
    phrases = {
        "+": ["Add {b} to that.", "Plus {b}?", "Now add {b}.", "And {b} more?"],
        "-": ["Subtract {b} from that.", "Minus {b}?", "Now subtract {b}.", "Take away {b}."],
    }
    return rng.choice(phrases[problem.operator]).format(b=problem.b), problem


def sample_questions(count: int, seed: int) -> list[tuple[str, int]]:
    """Return `count` different problems in varied phrasings as (question, result)."""
    rng = random.Random(seed)
    return [(ask(rng, p), p.result) for p in rng.sample(PROBLEMS, count)]


def is_correct(reply: str, result: int) -> bool:
    """Say whether the last number in the reply is the result."""
    numbers = re.findall(r"-?\d+", reply)
    return bool(numbers) and int(numbers[-1]) == result
