"""Fields that change logits, as users see them: each does what it says, over HTTP as in the offline API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pypto_serving import LLM, SamplingParams
from tests.e2e.server import Server
from tests.instruction_sets import ANSWERING

pytestmark = pytest.mark.e2e

PROMPT = "Count from 1 to 9."
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module", params=ANSWERING)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(kernels: str) -> Iterator[LLM]:
    with LLM(max_model_len=512, log_level="warning", kernels=kernels) as model:
        yield model


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[int]:
    """The answer without changes."""
    return answer(llm, {})


def answer(llm: LLM, fields: dict[str, Any]) -> list[int]:
    (result,) = llm.generate(PROMPT, SamplingParams(**PLAIN | fields), progress=False)
    return list(result.outputs[0].token_ids)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"100": 8.0, "7": -100}},
        {"allowed_token_ids": [5, 50, 60, 200]},
        {"bad_words": ["the", "a", "1"]},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.1, "bad_words": ["the"], "temperature": 1.0, "seed": 4},
    ],
    ids=lambda fields: "+".join(fields) or "none",
)
def test_http_answers_what_the_offline_api_answers(
    bundled_llm: LLM, bundled_server: Server, fields: dict[str, Any]
) -> None:
    """With the same kernels."""
    given = PLAIN | fields
    offline = given | {"logit_bias": {int(key): value for key, value in fields.get("logit_bias", {}).items()}}
    (result,) = bundled_llm.generate(PROMPT, SamplingParams(**offline), progress=False)
    with bundled_server.http as client:
        reply = client.post("/v1/completions", json={"prompt": PROMPT, **given})
    reply.raise_for_status()
    (choice,) = reply.json()["choices"]
    output = result.outputs[0]
    assert choice["text"] == output.text and output.logprobs is not None
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    assert choice["logprobs"]["token_logprobs"] == [entry[token].logprob for token, entry in pairs]


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
def test_penalties_change_what_comes_again(llm: LLM, field: str) -> None:
    """Over eight choices of 40 tokens, which differ by far more than the last bits of logits may change."""

    def num_distinct(penalty: float) -> int:
        drawn = {"temperature": 2.0, "seed": 1, "n": 8, "logprobs": None, field: penalty}
        (result,) = llm.generate(PROMPT, SamplingParams(**PLAIN | drawn), progress=False)
        return sum(len(set(output.token_ids)) for output in result.outputs)

    fewest, some, most = map(num_distinct, (-2.0, 0.0, 2.0))
    assert fewest + 20 < some < most - 20


def test_a_repetition_penalty_changes_what_comes_again(llm: LLM, plain: list[int]) -> None:
    assert len(set(answer(llm, {"repetition_penalty": 2.0}))) > len(set(plain)) + 10


def test_bans_and_biases_hold(llm: LLM, plain: list[int]) -> None:
    assert plain[0] not in answer(llm, {"logit_bias": {plain[0]: -100}})
    assert answer(llm, {"logit_bias": {plain[3]: 100}}) == [plain[3]] * len(plain)
    assert set(answer(llm, {"allowed_token_ids": plain[:3]})) <= set(plain[:3])
    pair = plain[4:6]
    without = answer(llm, {"bad_word_ids": [pair]})
    assert without[:5] == plain[:5] and pair not in [without[i : i + 2] for i in range(len(without))]


def test_bad_words_do_not_appear(llm: LLM) -> None:
    def text(**fields: Any) -> str:
        (result,) = llm.generate(PROMPT, SamplingParams(**PLAIN, **fields), progress=False)
        return result.outputs[0].text

    word = max(text().split(), key=len)
    assert word in text() and word not in text(bad_words=[word])
