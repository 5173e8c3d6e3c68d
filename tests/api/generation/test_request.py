"""From prompts to engine requests: max_tokens, special tokens, seeds and numbers of choices."""

from __future__ import annotations

import msgspec
import pytest

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.generation.request import (
    MAX_CHOICES,
    GenerationRequest,
    MaxTokens,
    check_num_choices,
    engine_requests,
    fit_params,
    fit_prompt,
)
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.service import SeedSource
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import ContextLengthError, RequestError
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.request import AddRequests, EngineRequest
from pypto_serving.types.sampling import SamplingParams
from tests.api.scripted_engine import engine_config

CONFIG = engine_config(100)
PROMPTER = Prompter.load(CONFIG, ServingConfig(model_dir="", served_model_names=("no files",)))


@pytest.mark.parametrize(
    ("asked", "default", "limit"),
    [(7, 16, 7), (None, 16, 16), (None, 99, 40), (None, None, 40), (40, None, 40), (41, 16, 40)],
)
def test_max_tokens_is_what_was_asked_else_the_default_else_what_fits(
    asked: int | None, default: int | None, limit: int
) -> None:
    assert MaxTokens(asked, default=default).fit(60, 100) == limit
    assert asked == 41 or MaxTokens(asked, default=default, strict=True).fit(60, 100) == limit


@pytest.mark.parametrize(("num_prompt", "asked", "strict"), [(60, 41, True), (100, None, False), (100, 1, False)])
def test_what_does_not_fit_is_refused(num_prompt: int, asked: int | None, strict: bool) -> None:
    with pytest.raises(ContextLengthError, match="100 tokens"):
        MaxTokens(asked, default=16, strict=strict).fit(num_prompt, 100)


def test_a_parser_sees_special_tokens_where_they_are_marks() -> None:
    params = SamplingParams(max_tokens=5)
    formats = (None, OutputFormat(), OutputFormat(shows_special=True))
    assert [fit_params(params, PROMPTER, form).skip_special_tokens for form in formats] == [True, True, False]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={99: 1.0, 100: 1.0}), "logit_bias: 100 is not between 0 and 99"),
        (SamplingParams(allowed_token_ids=(3, 500)), "allowed_token_ids: 500 is not between 0 and 99"),
        (SamplingParams(bad_word_ids=((3,), (4, 100))), "bad_word_ids: 100 is not between 0 and 99"),
        (SamplingParams(stop_token_ids=(100,)), "stop_token_ids: 100 is not between 0 and 99"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        fit_params(params, PROMPTER)
    assert caught.value.param == message.split(":")[0]
    assert fit_params(params, Prompter(engine_config(501), None, PROMPTER.chat_encoder)) is params


def test_seeds_are_given_or_drawn_and_always_64_unsigned_bits() -> None:
    drawn = [SeedSource(3).seed_of(SamplingParams()) for _ in range(2)]
    assert drawn[0] == drawn[1] != SeedSource(4).seed_of(SamplingParams())
    assert SeedSource(3).seed_of(SamplingParams(seed=-1)) == 2**64 - 1
    assert SeedSource(3).seed_of(SamplingParams(seed=5)) == 5


def test_choices_are_numbered_prompt_by_prompt_and_share_seed_and_tokens() -> None:
    params = SamplingParams(max_tokens=5, n=2)
    prompts = [fit_prompt([1, 2], MaxTokens(5), CONFIG), fit_prompt([3], MaxTokens(5), CONFIG)]
    request = GenerationRequest("id", prompts, params, priority=3, cache_salt="s")
    made = engine_requests(request, SeedSource(0), (9,), 1.5)
    assert request.num_choices == len(made) == 4
    assert [(r.request_id, r.choice, unpack_ids(r.token_ids).tolist()) for r in made] == [
        ("id-0", 0, [1, 2]),
        ("id-1", 1, [1, 2]),
        ("id-2", 0, [3]),
        ("id-3", 1, [3]),
    ]
    assert made[0].seed == made[1].seed != made[2].seed == made[3].seed
    assert made[0].token_ids is made[1].token_ids and made[0].params is made[1].params
    assert {(r.params.n, r.priority, r.cache_salt, r.eos_token_ids, r.arrival_s) for r in made} == {
        (1, 3, "s", (9,), 1.5)
    }


def packed(request: GenerationRequest) -> tuple[list[EngineRequest], list[bytes]]:
    made = engine_requests(request, SeedSource(0), (9,), 1.5)
    return made, [msgspec.msgpack.encode(message) for message in AddRequests.pack(made)]


def test_the_core_is_sent_each_prompt_once_and_parameters_once_and_no_stop_strings() -> None:
    params = SamplingParams(n=4, stop=("s" * 1000,), stop_token_ids=tuple(range(70, 90)), max_tokens=None)
    prompts = [fit_prompt([7] * length, MaxTokens(default=5), CONFIG) for length in [50] * 100 + [509, 509, 510]]
    made, messages = packed(GenerationRequest("id", prompts, params, 3, "c" * 1000))
    assert len(messages) == 3, "one for each max_tokens"
    ids = sum(len(prompt.packed_ids) for prompt in prompts)
    assert sum(map(len, messages)) < ids + 3 * 1200 + len(prompts) * 20 + len(made) * 10
    assert [each for data in messages for each in msgspec.msgpack.decode(data, type=AddRequests).unpack()] == made
    assert {each.params.max_tokens for each in made} == {5, 3, 2}


def test_unpacked_requests_share_tokens_and_parameters() -> None:
    prompt = fit_prompt([1] * 90, MaxTokens(5), CONFIG)
    _, (message,) = packed(GenerationRequest("id", [prompt], SamplingParams(n=128, max_tokens=5)))
    requests = msgspec.msgpack.decode(message, type=AddRequests).unpack()
    assert len(requests) == 128
    assert len({id(each.token_ids) for each in requests}) == len({id(each.params) for each in requests}) == 1


def test_requests_with_nothing_in_common_arrive_as_they_are() -> None:
    made = [
        EngineRequest(
            request_id=str(i), token_ids=pack_ids([i]), params=SamplingParams(top_k=i), priority=i % 2, seed=i
        )
        for i in range(5)
    ]
    assert [each for message in AddRequests.pack(made) for each in message.unpack()] == made


def test_min_tokens_beyond_what_fits_is_refused() -> None:
    params = SamplingParams(min_tokens=600, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens is 600"):
        packed(GenerationRequest("id", [fit_prompt([1], MaxTokens(), CONFIG)], params))


def test_a_request_makes_a_bounded_number_of_choices() -> None:
    """However long the queue is: the event loop makes them at one go."""
    roomy = engine_config(100, max_queued_requests=100_000)
    check_num_choices(MAX_CHOICES, 4, roomy)
    for num_prompts, param in ((27, "prompt"), (1, "n")):
        with pytest.raises(RequestError, match=f"at most {MAX_CHOICES}") as caught:
            check_num_choices(MAX_CHOICES + 1, num_prompts, roomy)
        assert caught.value.param == param
