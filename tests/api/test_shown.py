"""What answers show beside text: echoed prompts, log-probabilities of prompts, token ids, reasons of stops, usage."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from pypto_serving.api.generation import logprobs as collected_logprobs
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.request import EngineRequest
from tests.api.checkpoint import TEXT
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
HELLO = [{"role": "user", "content": "hello"}]


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [c for event in events for c in event["choices"] if c["index"] == index]


def refusal(server: RunningServer, path: str, **fields: Any) -> tuple[str, str]:
    """The field that a 400 names, and its message."""
    common = {"prompt": "hello"} if path == PATH else {"messages": HELLO}
    response = server.post(path, common | fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def test_echo_puts_the_prompt_before_the_text(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>the fox 中文")
    prompts = ["<|im_start|>the fox 中文", ids, ids[:-1]]
    for prompt, shown in zip(
        prompts, ["<|im_start|>the fox 中文"] * 2 + [tokenizer.decode(ids[:-1], False)], strict=True
    ):
        body = {"prompt": prompt, "max_tokens": 4, "echo": True}
        (choice,) = server.post(PATH, body).json()["choices"]
        assert choice["text"] == shown + tokenizer.decode(tokenizer.encode(TEXT)[:4])
        assert choice["logprobs"] is choice["prompt_logprobs"] is None
        assert server.engine.requests[-1].params.prompt_logprobs is None
        events = choices_of(server.events(PATH, body))
        assert events[0]["text"] == shown and events[0]["finish_reason"] is None
        assert "".join(event["text"] for event in events) == choice["text"]


def test_echoed_logprobs_cover_prompt_and_text(server: RunningServer, tokenizer: Tokenizer) -> None:
    """As lm-eval asks for loglikelihoods: the values of the prompt's tokens, null for the first, then those sampled."""
    prompt = "hello 😀 the quick brown fox"
    ids = tokenizer.encode(prompt)
    body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    (choice,) = server.post(PATH, body).json()["choices"]
    found = choice["logprobs"]
    assert [len(found[name]) for name in LISTS] == [len(ids) + 1] * 4
    assert found["token_logprobs"] == [None, *(-i / 8 for i in range(1, len(ids))), -0.5]
    assert found["top_logprobs"][0] is None
    for i, top in enumerate(found["top_logprobs"][1:-1], 1):
        assert sorted(top.values()) == [-i / 8, -i / 8 + 1 / 16], "the best token and the prompt's own"
    offsets = found["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] == len(prompt)
    for token, start, end in zip(found["tokens"], offsets, [*offsets[1:], len(choice["text"])], strict=True):
        assert token == choice["text"][start:end] or "\ufffd" in token
    assert choice["prompt_logprobs"] is None


def test_offsets_leave_out_special_tokens_that_the_text_lacks(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.raw.token_to_id("<|im_start|>"), *tokenizer.encode("the fox")]
    with_special = collected_logprobs.text_offsets(ids, "<|im_start|>the fox", tokenizer)
    without = collected_logprobs.text_offsets(ids, "the fox", tokenizer)
    assert (with_special[:2], without[:2]) == ([0, len("<|im_start|>")], [0, 0])
    assert [offset - len("<|im_start|>") for offset in with_special[1:]] == without[1:]
    assert max(collected_logprobs.text_offsets(ids, "t", tokenizer)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_echoing_streams_equal_whole_answers_for_any_portions(
    server: RunningServer, tokenizer: Tokenizer, seed: int
) -> None:
    """Also where a choice has ended before the log-probabilities of its prompt, which the first choice brings."""

    def script(request: EngineRequest) -> Script:
        return Script(tokenizer.encode(TEXT) if request.choice == 0 else tokenizer.encode("fox"))

    server.engine.script = script
    body = {"prompt": ["hello", "the quick brown fox"], "n": 3, "max_tokens": 40, "logprobs": 2, "echo": True}
    server.engine.seed = seed
    whole = server.post(PATH, body).json()["choices"]
    asked = [request.params.prompt_logprobs for request in server.engine.requests]
    assert asked == [2, None, None] * 2, "the prompt is scored once"
    server.engine.seed = seed + 1000
    events = server.events(PATH, body)
    for choice in whole:
        mine = choices_of(events, choice["index"])
        assert mine[0]["text"] == body["prompt"][choice["index"] // 3]
        assert "".join(event["text"] for event in mine) == choice["text"]
        for name in LISTS:
            assert [*itertools.chain.from_iterable(e["logprobs"][name] for e in mine)] == choice["logprobs"][name]


def samples(server: RunningServer) -> list[float]:
    """What /metrics says of output tokens."""
    text = server.http.get("/metrics").text
    names = ["request_generation_tokens_count", "request_generation_tokens_sum", "time_to_first_token_seconds_count"]
    return [float(re.findall(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE)[0]) for name in names]


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_no_tokens_at_all(server: RunningServer, tokenizer: Tokenizer, logprobs: int | None) -> None:
    before = samples(server)
    for echo, prompt in itertools.product((False, True), ("hello fox", [5])):
        body = {"prompt": prompt, "max_tokens": 0, "echo": echo, "logprobs": logprobs}
        answer = server.post(PATH, body).json()
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(ids, False) if echo else "", "length")
        assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, len(ids))
        if logprobs is not None:
            assert len(choice["logprobs"]["token_logprobs"]) == (len(ids) if echo else 0)
        last = choices_of(server.events(PATH, body))[-1]
        assert last["finish_reason"] == "length"
    grown = [after - value for after, value in zip(samples(server), before, strict=True)]
    assert grown == [8, 0, 0], "each counts as a request, none as a first token"


def test_prompt_logprobs_are_in_vllms_form(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick fox")
    body = {"prompt": [ids, ids[:1]], "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    choices = server.post(PATH, body).json()["choices"]
    for choice in choices[:2]:
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(ids) - 1
        for i, entry in enumerate(others, 1):
            own, best = str(ids[i]), str(ids[i] + 1)
            names = {token: tokenizer.token_bytes(int(token)).decode(errors="replace") for token in (own, best)}
            assert entry[own] == {"logprob": -i / 8, "rank": 2, "decoded_token": names[own]}
            assert entry[best] == {"logprob": -i / 8 + 1 / 16, "rank": 1, "decoded_token": names[best]}
    assert [choice["prompt_logprobs"] for choice in choices[2:]] == [[None]] * 2
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 2, "prompt_logprobs": 0, "n": 2}).json()
    scored = unpack_ids(server.engine.requests[-1].token_ids).tolist()
    assert [list(map(int, each or ())) for each in answer["prompt_logprobs"]] == [[], *([i] for i in scored[1:])]


def test_both_kinds_of_prompt_logprobs_at_once(server: RunningServer) -> None:
    body = {"prompt": "the quick fox", "max_tokens": 1, "prompt_logprobs": 3, "echo": True, "logprobs": 1}
    (choice,) = server.post(PATH, body).json()["choices"]
    assert server.engine.requests[-1].params.prompt_logprobs == 3
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [4] * (len(choice["prompt_logprobs"]) - 1)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:-1]} == {2}


def test_prompt_logprobs_have_bounds(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (PATH, CHAT):
        for value in (-1, 21):
            assert refusal(server, path, prompt_logprobs=value)[0] == "prompt_logprobs"
        assert refusal(server, path, prompt_logprobs=1, stream=True)[0] == "prompt_logprobs"
        assert refusal(server, path, prompt_logprobs="1")[0] == "prompt_logprobs"
    body = {"prompt": [[5] * 100] * 4, "max_tokens": 1, "echo": True, "logprobs": 4, "n": 2}
    monkeypatch.setattr(collected_logprobs, "MAX_ANSWER_PROMPT_LOGPROBS", 4 * 100 * 2 * 5)
    assert server.post(PATH, body).status_code == 200
    monkeypatch.setattr(collected_logprobs, "MAX_ANSWER_PROMPT_LOGPROBS", 4 * 100 * 2 * 5 - 1)
    param, message = refusal(server, PATH, **body)
    assert param == "prompt_logprobs" and "400 prompt tokens in 2 choices" in message


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_logprobs_of_an_answer_have_a_bound(server: RunningServer, path: str) -> None:
    """For whole answers only; a stream holds none of them."""
    own = (
        {"prompt": "hello", "logprobs": 20}
        if path == PATH
        else {"messages": HELLO, "logprobs": True, "top_logprobs": 20}
    )
    body = {**own, "n": 128, "max_tokens": 2**20 // 128 // 21}
    assert server.post(path, body).status_code == 200
    body["max_tokens"] += 1
    param, message = refusal(server, path, **body)
    assert param == "logprobs" and "of 128 choices of up to 391 tokens" in message
    assert server.events(path, body)


@pytest.mark.parametrize(("path", "kind"), [(PATH, "cmpl"), (CHAT, "chatcmpl")])
def test_the_id_of_an_answer_is_the_client_s(server: RunningServer, path: str, kind: str) -> None:
    body = {"prompt": "hello"} if path == PATH else {"messages": HELLO}
    for _ in range(2):  # the server's own stay unique
        assert server.post(path, {**body, "request_id": "my/req-1"}).json()["id"] == f"{kind}-my/req-1"
    assert {event["id"] for event in server.events(path, {**body, "request_id": "x"})} == {f"{kind}-x"}
    assert len({made.request_id for made in server.engine.requests}) == len(server.engine.requests)
    assert server.post(path, {**body, "request_id": None}).json()["id"].startswith(f"{kind}-")
    for bad in ("", "a b", "\u00e9", "x" * 129, "a\n"):
        param, message = refusal(server, path, **body, request_id=bad)
        assert param == "request_id" and "1 to 128 visible characters" in message
    assert refusal(server, path, **body, request_id=5)[0] == "request_id"


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_token_ids_of_prompt_and_output(server: RunningServer, tokenizer: Tokenizer, path: str) -> None:
    stop = tokenizer.encode(TEXT)[6]
    server.engine.script = lambda request: Script(tokenizer.encode(TEXT)[:7], finish="stop", stop_token_id=stop)
    common = {"prompt": "hello"} if path == PATH else {"messages": HELLO}
    body = {**common, "max_tokens": 50, "n": 2, "stop_token_ids": [stop], "return_token_ids": True}
    answer, events = server.post(path, body).json(), server.events(path, body)
    prompt = unpack_ids(server.engine.requests[-1].token_ids).tolist()
    for index, choice in enumerate(answer["choices"]):
        assert (choice["token_ids"], choice["stop_reason"]) == (tokenizer.encode(TEXT)[:7], stop)
        mine = choices_of(events, index)
        assert [i for event in mine for i in event.get("token_ids", ())] == choice["token_ids"]
        assert mine[-1]["stop_reason"] == stop and all("stop_reason" not in event for event in mine[:-1])
    if path == PATH:
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt, prompt]
        assert [choices_of(events, i)[0]["prompt_token_ids"] for i in (0, 1)] == [prompt, prompt]
    else:
        assert answer["prompt_token_ids"] == events[0]["prompt_token_ids"] == prompt
    plain = server.post(path, {**body, "return_token_ids": False}).json()
    assert [choice["token_ids"] for choice in plain["choices"]] == [None, None]


def test_tokens_as_token_ids(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids, prompt = tokenizer.encode(TEXT)[:3], tokenizer.encode("the fox")
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    (choice,) = server.post(PATH, body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in prompt + ids]
    assert choice["text"] == "the fox" + tokenizer.decode(ids)
    chat = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "return_tokens_as_token_ids": True}
    (choice,) = server.post(CHAT, chat).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_the_stop_string_is_the_reason_and_may_stay(server: RunningServer, path: str) -> None:
    common = {"prompt": "hello"} if path == PATH else {"messages": HELLO}
    for shown in (False, True):
        body = {**common, "max_tokens": 90, "stop": ["zzz", "fox j"], "include_stop_str_in_output": shown}
        (choice,) = server.post(path, body).json()["choices"]
        text = choice["text"] if path == PATH else choice["message"]["content"]
        assert text == TEXT[: TEXT.index("fox j") + 5 * shown]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "fox j")
        assert choices_of(server.events(path, body))[-1]["stop_reason"] == "fox j"
    (choice,) = server.post(path, {**common, "max_tokens": 90}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_a_stop_token_may_stay(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)[:7]
    server.engine.script = lambda request: Script(ids, finish="stop", stop_token_id=ids[-1])
    body = {"prompt": "hello", "max_tokens": 50, "stop_token_ids": [ids[-1]]}
    texts = [
        server.post(PATH, body | {"include_stop_str_in_output": shown}).json()["choices"][0]["text"]
        for shown in (False, True)
    ]
    assert texts == [tokenizer.decode(ids[:-1]), tokenizer.decode(ids)]


def test_best_of_shows_the_likeliest(server: RunningServer, tokenizer: Tokenizer) -> None:
    words = ["fox", "hello", "dog", "world"]
    scores = [-0.0, -2.0, -1.0, -3.0]
    server.engine.script = lambda r: Script(tokenizer.encode(words[r.choice]), logprob=scores[r.choice])
    body = {"prompt": ["a", "b"], "max_tokens": 50, "n": 2, "best_of": 4}
    answer = server.post(PATH, body).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "fox", None),
        (1, "dog", None),
        (2, "fox", None),
        (3, "dog", None),
    ]
    assert answer["usage"]["completion_tokens"] == 2 * sum(len(tokenizer.encode(word)) for word in words)
    assert all(c["logprobs"]["tokens"] for c in server.post(PATH, body | {"logprobs": 0}).json()["choices"])
    assert server.events(PATH, {"prompt": "a", "n": 2, "best_of": 2})
    for fields in ({"best_of": 1, "n": 2}, {"best_of": 129}, {"best_of": 2, "stream": True}, {"best_of": "2"}):
        assert refusal(server, PATH, **fields)[0] == "best_of"
    assert refusal(server, CHAT, best_of=2)[0] == "best_of"


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_usage_in_every_event(server: RunningServer, path: str) -> None:
    common = {"prompt": "hello"} if path == PATH else {"messages": HELLO}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(path, {**common, "max_tokens": 20, "stream_options": options})
    *counts, whole = [event["usage"] for event in events]
    assert [count["completion_tokens"] for count in counts] == sorted(count["completion_tokens"] for count in counts)
    assert len({count["completion_tokens"] for count in counts}) > 2
    for count in counts:
        assert count["total_tokens"] == count["prompt_tokens"] + count["completion_tokens"]
    assert counts[-1] == {name: whole[name] for name in counts[-1]}
    plain = server.events(path, {**common, "max_tokens": 20, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in event for event in plain)


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_truncated_prompts_say_so(server: RunningServer, tokenizer: Tokenizer, path: str) -> None:
    text = "the quick brown fox " * 200
    common = {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
    assert server.post(path, {**common, "max_tokens": 8}).status_code == 400
    for limit, kept in ((5, 5), (-1, 512 - 8)):
        body = {**common, "max_tokens": 8, "truncate_prompt_tokens": limit}
        response = server.post(path, body)
        usage, sent = response.json()["usage"], unpack_ids(server.engine.requests[-1].token_ids).tolist()
        assert len(sent) == usage["prompt_tokens"] == kept
        cut = usage["prompt_tokens_details"]["truncated_tokens"]
        assert cut > 100 and response.headers["x-truncated-prompt-tokens"] == str(cut)
        if path == PATH:
            assert sent == tokenizer.encode(text)[-kept:] and cut == len(tokenizer.encode(text)) - kept
            echoed = server.post(path, body | {"echo": True}).json()["choices"][0]["text"]
            assert echoed.startswith(tokenizer.decode(sent, False))
        streamed = server.events(path, {**body, "stream_options": {"include_usage": True}})
        assert streamed[-1]["usage"] == usage
    short = server.post(path, {**common | {"prompt": "a", "messages": HELLO}, "truncate_prompt_tokens": 200})
    assert short.json()["usage"]["prompt_tokens_details"]["truncated_tokens"] == 0
    for limit in (0, -2, 2**40):
        assert refusal(server, path, truncate_prompt_tokens=limit)[0] == "truncate_prompt_tokens"


def test_fields_that_platforms_send(server: RunningServer) -> None:
    fields: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "store": False, "safety_identifier": "x"}
    fields |= {"prompt_cache_key": "y", "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h"}
    for path, said in (
        (PATH, {"prompt": "a"}),
        (CHAT, {"messages": HELLO, "verbosity": "medium", "modalities": ["text"]}),
    ):
        response = server.post(path, said | fields)
        assert response.status_code == 200 and "x-ignored-fields" not in response.headers
        for tier in ("auto", "default", "flex", "scale", "priority", "fast"):
            assert server.post(path, said | {"service_tier": tier}).json()["service_tier"] == "default"
        response = server.post(path, said | {"service_tier": "best", "store": True})
        assert response.json()["service_tier"] == "default"
        assert response.headers["x-ignored-fields"] == "store, service_tier"


def test_content_parts_of_text_alone(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "hello", "prompt_cache_breakpoint": {}}, {"type": "text", "text": "fox"}]
    assert server.post(CHAT, {"messages": [{"role": "user", "content": parts}]}).status_code == 200
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    param, message = refusal(server, CHAT, messages=[{"role": "user", "content": [*parts, image]}])
    assert param == "messages[0].content[2]" and "image_url" in message and "'type': 'text'" in message


def test_keys_of_vllm_that_are_null(server: RunningServer) -> None:
    """Clients of vLLM read these without asking whether they are there."""
    answer = server.post(PATH, {"prompt": "hello"}).json()
    everywhere = ("service_tier", "system_fingerprint", "kv_transfer_params")
    assert [answer[name] for name in everywhere] == [None] * 3
    names = ("stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "logprobs")
    assert [answer["choices"][0][name] for name in names] == [None] * 5
    chat = server.post(CHAT, {"messages": HELLO}).json()
    assert [chat[name] for name in (*everywhere, "prompt_logprobs", "prompt_token_ids")] == [None] * 5
    assert [chat["choices"][0][name] for name in ("stop_reason", "token_ids", "logprobs")] == [None] * 3
