"""What the bundled model is taught, asked of the engine: sums and differences, its other skills, and their limits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from bundled_model.arithmetic import PROBLEMS, ask
from bundled_model.evaluation import TASKS, earlier_chat, task_turns
from bundled_model.refusals import ONLY_COUNT, ONLY_KNOWN, ONLY_SMALL, ONLY_WORDS, UNKNOWN
from bundled_model.tokenizer import Encoder
from tokenizers import Tokenizer

from pypto_serving import LLM, SamplingParams
from pypto_serving.setup.locate import BUNDLED
from tests.e2e.questions import user

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(temperature=0, max_tokens=400)
"""More tokens than the longest reply has: "Count to 100." takes 391."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=4096, log_level="warning") as model:
        yield model


def replies(llm: LLM, questions: Sequence[str]) -> list[str]:
    """Greedy replies, each of which must have come to an end."""
    results = llm.chat([[user(question)] for question in questions], GREEDY, progress=False)
    ends = [result.outputs[0].finish_reason for result in results]
    assert [question for question, end in zip(questions, ends, strict=True) if end != "stop"] == []
    return [result.outputs[0].text for result in results]


def wrong(llm: LLM, expected: dict[str, str]) -> dict[str, str]:
    """The questions that are not answered as expected, with their replies."""
    found = zip(expected, replies(llm, list(expected)), strict=True)
    return {question: reply for question, reply in found if reply != expected[question]}


def test_every_sum_and_difference(llm: LLM) -> None:
    assert wrong(llm, {f"What is {p.a}{p.operator}{p.b}?": p.reply for p in PROBLEMS}) == {}


def test_sums_and_differences_in_any_phrasing(llm: LLM) -> None:
    rng = random.Random(0)
    assert wrong(llm, {ask(rng, p): p.reply for p in rng.sample(PROBLEMS, 2000)}) == {}


def test_sums_and_differences_behind_a_long_chat(llm: LLM) -> None:
    rng = random.Random(0)
    encoder = Encoder(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")))
    for _ in range(3):
        earlier = earlier_chat(rng, encoder, 1500)
        problems = rng.sample(PROBLEMS, 300)
        results = llm.generate([earlier + encoder.prompt(ask(rng, p)) for p in problems], GREEDY, progress=False)
        assert [result.outputs[0].text for result in results] == [p.reply for p in problems]


CASES = {
    "10-1": "10 - 1 = 9",
    "10 - 1 =": "10 - 1 = 9",
    "What is -5+3?": ONLY_SMALL,
    "5 - -3": ONLY_SMALL,
    "What is 100+1?": ONLY_SMALL,
    "2+2+2": ONLY_SMALL,
    "What is 3*4?": ONLY_SMALL,
    "spell 'Hello'": "H-e-l-l-o.",
    "Spell hello": "h-e-l-l-o.",
    "Spell naïve": ONLY_WORDS,
    "Count from 9 to 2": "9, 8, 7, 6, 5, 4, 3, 2",
    "Count from 2 to 9": "2, 3, 4, 5, 6, 7, 8, 9",
    "Count from 5 to 5.": "5",
    "Count to 100.": ", ".join(map(str, range(1, 101))),
    "Count to 1000.": ONLY_COUNT,
    "Count from -3 to 3.": ONLY_COUNT,
    "What comes after 100?": ONLY_KNOWN,
    "Add 5 to that.": ONLY_SMALL,
    "": UNKNOWN,
}


def test_where_its_skills_end(llm: LLM) -> None:
    assert wrong(llm, CASES) == {}


@pytest.mark.parametrize("task", TASKS)
def test_skills(llm: LLM, task: str) -> None:
    expected = dict(task_turns(task, 300, seed=3))
    assert len(wrong(llm, expected)) <= 0.03 * len(expected)
