"""One choice: its text, its token ids and when it ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pypto_serving.api.generation.choice import Choice, StopPatterns
from pypto_serving.api.generation.request import FittedPrompt, GenerationRequest
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import EngineRequest, RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import TokenLogprobs
from tests.api.text.tokenizers import TOKENIZER


def new_choice(keep_token_ids: bool = False, **params: object) -> Choice:
    request = EngineRequest(request_id="a", token_ids=b"", params=SamplingParams(**params))
    stops = StopPatterns(request.params.stop) if request.params.stop else None
    wanted = GenerationRequest("a", [FittedPrompt(pack_ids([1]), 9)], request.params, keep_token_ids=keep_token_ids)
    return Choice(0, request, wanted, TOKENIZER, stops)


def portions(ids: list[int], size: int) -> list[RequestOutput]:
    made = [RequestOutput(request_id="a", token_ids=pack_ids(ids[i : i + size])) for i in range(0, len(ids), size)]
    return [*made, RequestOutput(request_id="a", finish_reason="length", num_cached_tokens=2)]


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("stop", [(), ("mps",)])
def test_token_ids_are_kept_up_to_the_one_that_completes_a_stop_string(size: int, stop: tuple[str, ...]) -> None:
    ids = TOKENIZER.encode("the quick brown fox jumps over")
    choice, text = new_choice(keep_token_ids=True, stop=stop), ""
    kept: list[int] = []
    for output in portions(ids, size):
        if choice.finish_reason is None and (delta := choice.take(output)) is not None:
            text += delta.text
            kept += delta.token_ids or []
            assert delta.stop_reason == (stop[0] if stop and delta.finish_reason else None)
    assert choice.finish_reason == ("stop" if stop else "length")
    assert kept == ids[: choice.num_tokens]
    assert text == ("the quick brown fox ju" if stop else "the quick brown fox jumps over")
    assert TOKENIZER.decode(kept).startswith(text + "mps" if stop else text)


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "said"),
    [
        ("ab", 0, ""),
        ("ab", 1, ""),  # begins within min_tokens, ends after it
        ("ab", 2, "abx"),  # ends within min_tokens, so the next one counts
        ("bxab", 3, "a"),
        ("aba", 3, "abx"),
        ("x", 9, "abxabax"),
    ],
)
def test_stop_strings_count_where_they_end(size: int, stop: str, min_tokens: int, said: str) -> None:
    """One that ends after `min_tokens` counts, wherever it begins."""
    ids = [TOKENIZER.encode(char)[0] for char in "abxabax"]
    choice, text = new_choice(stop=(stop,), min_tokens=min_tokens), ""
    for output in portions(ids, size):
        if choice.finish_reason is None and (delta := choice.take(output)) is not None:
            text += delta.text
    assert text == said
    assert choice.finish_reason == ("length" if said == "abxabax" else "stop")


@pytest.mark.parametrize(("stop", "num_tokens", "accepted"), [("a", 1, 1), ("b", 2, 2), ("c", 3, 3), ("d", 4, 3)])
def test_accepted_drafts_are_those_among_the_tokens(stop: str, num_tokens: int, accepted: int) -> None:
    """Of four tokens of a step with three drafts, all right, those up to the end of a stop string."""
    ids = [TOKENIZER.encode(char)[0] for char in "abcd"]
    choice = new_choice(stop=(stop,))
    choice.take(RequestOutput(request_id="a", token_ids=pack_ids(ids), num_drafts=3, num_accepted=3))
    assert (choice.num_tokens, choice.num_drafts, choice.num_accepted) == (num_tokens, 3, accepted)


def test_token_ids_are_not_kept_unless_asked_for() -> None:
    choice = new_choice()
    deltas = [delta for output in portions([5, 6], 1) if (delta := choice.take(output)) is not None]
    assert {delta.token_ids for delta in deltas} == {None}
    assert (choice.num_tokens, choice.num_cached) == (2, 2)


def test_logprobs_come_as_the_engine_sent_them() -> None:
    top = TokenLogprobs(-math.inf, 3, pack_ids([7, 8]), np.array([-0.5, -math.inf], "<f4").tobytes())
    output = RequestOutput(request_id="a", token_ids=pack_ids([5]), logprobs=[top], finish_reason="length")
    delta = new_choice(logprobs=2).take(output)
    assert delta is not None and delta.logprobs is not None
    (entry,) = delta.logprobs
    assert [(t.token_id, t.logprob, t.rank) for t in (entry.chosen, *entry.top)] == [
        (5, -math.inf, 3),
        (7, -0.5, 1),
        (8, -math.inf, 2),
    ]
    assert entry.chosen.utf8 == TOKENIZER.token_bytes(5)
