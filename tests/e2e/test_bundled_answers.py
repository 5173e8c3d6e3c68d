"""What the bundled model is taught, asked of the engine: sums and differences, its other skills, and their limits."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from bundled_model.arithmetic import PROBLEMS, ask
from bundled_model.evaluation import task_turns
from bundled_model.refusals import ONLY_COUNT, ONLY_KNOWN, ONLY_SMALL, ONLY_WORDS, UNKNOWN
from bundled_model.tokenizer import Encoder
from tokenizers import Tokenizer

from pypto_serving import LLM, SamplingParams
from pypto_serving.setup.locate import BUNDLED
from tests.e2e.questions import user

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(temperature=0, max_tokens=400)
"""More tokens than the longest reply has: "Count to 100." takes 391."""

EVERY, ANY_PHRASING, BEHIND_A_CHAT = 0, 0, 0
"""How many of 20,000, of 300 and of 80 problems these weights get wrong."""

SKILLS = {
    "greetings": {300: 0, 40: 0},
    "facts": {300: 0, 40: 0},
    "counting": {300: 0, 40: 0},
    "number order": {300: 5, 40: 0},
    "spelling": {300: 9, 40: 3},
    "alphabet, days, months": {300: 1, 40: 0},
    "repeating": {300: 9, 40: 3},
    "unknown questions": {300: 1, 40: 0},
    "odd input": {300: 6, 40: 0},
    "other calculations": {300: 0, 40: 0},
    "beyond a skill": {300: 2, 40: 0},
    "common requests": {300: 0, 40: 0},
    "letters without an end": {300: 13, 40: 1},
    "JSON on request": {300: 19, 40: 2},
    "functions that are not there": {300: 0, 40: 0},
}
"""How many of 300 and of 40 questions of each task these weights get wrong, each counted once."""


@pytest.fixture
def llm(bundled_llm: LLM) -> LLM:
    return bundled_llm


class Replies(NamedTuple):
    """The questions that are not answered as expected, and those whose reply has no end."""

    wrong: dict[str, str]
    endless: list[str]


def ask_for(llm: LLM, expected: dict[str, str]) -> Replies:
    results = llm.chat([[user(question)] for question in expected], GREEDY, progress=False)
    found = {question: result.outputs[0] for question, result in zip(expected, results, strict=True)}
    wrong = {question: output.text for question, output in found.items() if output.text != expected[question]}
    return Replies(wrong, [question for question, output in found.items() if output.finish_reason != "stop"])


@pytest.mark.parametrize("count", [400, pytest.param(len(PROBLEMS), marks=pytest.mark.soak)])
def test_sums_and_differences(llm: LLM, count: int) -> None:
    problems = random.Random(count).sample(PROBLEMS, count)
    assert len(ask_for(llm, {f"What is {p.a}{p.operator}{p.b}?": p.reply for p in problems}).wrong) <= EVERY


def test_sums_and_differences_in_any_phrasing(llm: LLM) -> None:
    rng = random.Random(0)
    assert len(ask_for(llm, {ask(rng, p): p.reply for p in rng.sample(PROBLEMS, 150)}).wrong) <= ANY_PHRASING


def long_chat(rng: random.Random, encoder: Encoder) -> list[int]:
    """Ids of at least 1,500 tokens of questions of all tasks, half of them sums and differences."""
    others = [turn for task in SKILLS for turn in task_turns(task, 20, seed=4)]
    ids: list[int] = []
    while len(ids) < 1500:
        problem = rng.choice(PROBLEMS)
        question, reply = rng.choice([(ask(rng, problem), problem.reply), rng.choice(others)])
        ids += encoder.turn(question, reply)[0]
    return ids


@pytest.mark.soak  # test_bundled.py has a long chat
def test_sums_and_differences_behind_a_long_chat(llm: LLM) -> None:
    rng = random.Random(0)
    encoder = Encoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    found = 0
    for _ in range(2):
        earlier = long_chat(rng, encoder)
        problems = rng.sample(PROBLEMS, 40)
        results = llm.generate([earlier + encoder.prompt(ask(rng, p)) for p in problems], GREEDY, progress=False)
        found += sum(result.outputs[0].text != p.reply for result, p in zip(results, problems, strict=True))
    assert found <= BEHIND_A_CHAT


CASES = {
    "10-1": "10 - 1 = 9",
    "10 - 1 =": "10 - 1 = 9",
    "What is -5+3?": ONLY_SMALL,
    "5 - -3": ONLY_SMALL,
    "What is 100+1?": ONLY_SMALL,
    "What's 5+-3?": ONLY_SMALL,
    "100-1": ONLY_SMALL,
    "2+2+2": ONLY_SMALL,
    "What is 3*4?": ONLY_SMALL,
    "spell 'Hello'": "H-e-l-l-o.",
    "Spell hello": "h-e-l-l-o.",
    "Spell naïve": ONLY_WORDS,
    "Count from 9 to 2": "9, 8, 7, 6, 5, 4, 3, 2",
    "Count from 2 to 9": "2, 3, 4, 5, 6, 7, 8, 9",
    "Count to 100.": ", ".join(map(str, range(1, 101))),
    "Count from 5 to 5.": "5",
    "Count to 1000.": ONLY_COUNT,
    "Count from -3 to 3.": ONLY_COUNT,
    "What comes after 100?": ONLY_KNOWN,
    "Add 5 to that.": ONLY_SMALL,
    "": UNKNOWN,
}


def test_where_its_skills_end(llm: LLM) -> None:
    assert ask_for(llm, CASES) == ({}, [])


@pytest.mark.parametrize("task", SKILLS)
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.soak)])
def test_skills(llm: LLM, task: str, count: int) -> None:
    found = ask_for(llm, dict(task_turns(task, count, seed=3)))
    assert len(found.wrong) <= SKILLS[task][count]
    assert not found.endless
