"""POST /v1/completions over real HTTP."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import unpack_ids
from tests.api.checkpoint import TEXT
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

PATH = "/v1/completions"


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_the_official_client(server: RunningServer, tokenizer: Tokenizer) -> None:
    result = server.openai().completions.create(model="tiny", prompt="hello", max_tokens=200)
    tokens = tokenizer.encode(TEXT)
    assert result.choices[0].text == TEXT
    assert (result.choices[0].finish_reason, result.model, result.object) == ("length", "tiny", "text_completion")
    assert result.usage is not None
    assert result.usage.completion_tokens == len(tokens)
    assert result.usage.prompt_tokens == len(tokenizer.encode("hello"))


def test_the_official_client_streams(server: RunningServer) -> None:
    stream = server.openai().completions.create(model="tiny", prompt="hello", max_tokens=200, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("seed", range(12))
def test_streams_equal_whole_answers_for_any_portions(server: RunningServer, tokenizer: Tokenizer, seed: int) -> None:
    server.engine.script = lambda request: Script(tokenizer.encode(TEXT) * (1 + request.choice), cached=3)
    body = {"prompt": ["hello", "the fox"], "n": 2, "max_tokens": 120, "logprobs": 2, "stop": ["zzz", "once m"]}
    server.engine.seed = seed
    whole = server.post(PATH, body).json()
    server.engine.seed = seed + 1000
    events = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == choice["text"] == TEXT.partition("once m")[0]
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = list(itertools.chain.from_iterable(c["logprobs"][key] for c in mine))
            assert streamed == choice["logprobs"][key]


def test_all_forms_of_prompts(server: RunningServer, tokenizer: Tokenizer) -> None:
    hello, fox = tokenizer.encode("hello"), tokenizer.encode("fox")
    forms = [("hello", [hello]), (["hello", "fox"], [hello, fox]), (hello, [hello]), ([hello, fox], [hello, fox])]
    for prompt, expected in forms:
        server.engine.requests.clear()
        response = server.post(PATH, {"prompt": prompt, "max_tokens": 3})
        assert len(response.json()["choices"]) == len(expected)
        assert [unpack_ids(r.token_ids).tolist() for r in server.engine.requests] == expected


def test_defaults_of_the_checkpoint_and_of_the_request(server: RunningServer) -> None:
    server.post(PATH, {"prompt": "hello"})
    server.post(PATH, {"prompt": "hello", "temperature": 0, "top_p": None, "top_k": 5, "min_p": 0.25, "max_tokens": 7})
    first, second = (request.params for request in server.engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.max_tokens) == (0.6, 0.9, 20, 0.0, 16)
    assert (second.temperature, second.top_p, second.top_k, second.min_p, second.max_tokens) == (0, 0.9, 5, 0.25, 7)
    assert server.engine.requests[0].eos_token_ids == (0, 2)


def test_all_parameters_reach_the_engine(server: RunningServer) -> None:
    given = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5, 6], "skip_special_tokens": False}
    server.post(PATH, {"prompt": "hello", "stop": "x", "logprobs": 3, "seed": 11, "n": 3, **given})
    requests = server.engine.requests
    params = requests[0].params
    assert {name: getattr(params, name) for name in given} == {**given, "stop_token_ids": (5, 6)}
    assert (params.stop, params.logprobs, params.n) == ((), 3, 1)
    assert [(request.seed, request.choice) for request in requests] == [(11, 0), (11, 1), (11, 2)]


def test_seeds_are_drawn_per_prompt_and_shared_by_choices(server: RunningServer) -> None:
    server.post(PATH, {"prompt": ["hello", "hello"], "n": 2, "max_tokens": 1})
    seeds = [request.seed for request in server.engine.requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens_abort_the_rest(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "hello", "stop": ["mps ov", "never"], "max_tokens": 200}
    if stream:
        events = server.events(PATH, body)
        text, reason = joined(events), events[-1]["choices"][0]["finish_reason"]
    else:
        choice = server.post(PATH, body).json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("the quick brown fox ju", "stop")
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


def test_the_token_count_of_a_stop_does_not_depend_on_portions(server: RunningServer) -> None:
    counts = set()
    for seed in range(6):
        server.engine.seed = seed
        counts.add(
            server.post(PATH, {"prompt": "hello", "stop": "fox", "max_tokens": 200}).json()["usage"][
                "completion_tokens"
            ]
        )
    assert len(counts) == 1


def test_stop_strings_wait_for_min_tokens(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Script(tokenizer.encode("fox") * 9)
    count = 4 * len(tokenizer.encode("fox"))
    choice = server.post(PATH, {"prompt": "a", "stop": "fox", "min_tokens": count, "max_tokens": 99}).json()["choices"][
        0
    ]
    assert (choice["text"], choice["finish_reason"]) == ("fox" * 4, "stop")


def test_a_stop_token_is_counted_but_not_shown(server: RunningServer, tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("hello"), *tokenizer.encode("!")]
    server.engine.script = lambda request: Script(tokens, finish="stop", stop_token_id=tokens[-1])
    result = server.post(PATH, {"prompt": "a", "max_tokens": 50, "stop_token_ids": [tokens[-1]]}).json()
    assert (result["choices"][0]["text"], result["choices"][0]["finish_reason"]) == ("hello", "stop")
    assert result["usage"]["completion_tokens"] == len(tokens)


def test_special_tokens_can_be_shown(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Script([*tokenizer.encode("hello"), 2])
    shown = server.post(PATH, {"prompt": "a", "skip_special_tokens": False}).json()
    hidden = server.post(PATH, {"prompt": "a"}).json()
    assert shown["choices"][0]["text"] == "hello<|im_end|>"
    assert hidden["choices"][0]["text"] == "hello"


def test_logprobs(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Script(tokenizer.encode("the 中fox"))
    choice = server.post(PATH, {"prompt": "a", "max_tokens": 50, "logprobs": 2}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len({len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert set(logprobs["token_logprobs"]) == {-0.5}
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == -0.5
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("\ufffd") or choice["text"].startswith(token, offset)


def test_logprobs_zero_shows_the_sampled_token_only(server: RunningServer) -> None:
    choice = server.post(PATH, {"prompt": "a", "max_tokens": 4, "logprobs": 0}).json()["choices"][0]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [token] for token in choice["logprobs"]["tokens"]
    ]


def test_cached_tokens_are_always_reported(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Script(tokenizer.encode("fox"), cached=16)
    usage = server.post(PATH, {"prompt": "a", "n": 3}).json()["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 16,
        "cached_tokens_by_tier": {"device": 16, "host": 0, "disk": 0, "remote": 0},
    }
    assert usage["prompt_tokens"] == 1
    assert usage["total_tokens"] == 1 + 3 * len(tokenizer.encode("fox"))


def test_a_long_text_is_encoded_beside_the_event_loop(server: RunningServer) -> None:
    response = server.post(PATH, {"prompt": "fox " * 9000, "max_tokens": 4})
    assert response.status_code == 400
    assert "maximum context length is 512 tokens" in response.json()["error"]["message"]
