"""What counts as success, when a token has arrived, and how each kind of failure is told."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pypto_serving.bench.client import ApiClient, BenchmarkError, ReplyParser, find_model
from pypto_serving.bench.datasets import Prompt
from pypto_serving.bench.options import Target

PROMPT = Prompt([1, 2, 3], 3, 4)
MESSAGES = Prompt([{"role": "user", "content": "hi"}], None, 4)


def send(server_url, model, prompt=PROMPT, count=1, **target):
    """The records of `count` requests sent one after the other over one client."""

    async def main():
        client = ApiClient(Target(base_url=server_url, **target), model)
        try:
            return [await client.send(client.encode(prompt), prompt.input_len) for _ in range(count)]
        finally:
            client.close()

    return asyncio.run(main())


@pytest.mark.parametrize(("backend", "prompt"), [("openai", PROMPT), ("openai-chat", MESSAGES)])
def test_success_on_both_endpoints(server, backend, prompt):
    (record,) = send(server.url, "ok", prompt, backend=backend)
    assert record.error == ""
    assert (record.prompt_tokens, record.output_tokens) == (7, 4)
    assert record.text == "t0 t1 t2 t3 "
    assert len(record.itls_s) == 3
    assert 0 < record.ttft_s <= record.latency_s
    assert record.ttft_s + sum(record.itls_s) == pytest.approx(record.latency_s)


def test_request_body(server):
    send(server.url, "ok", ignore_eos=True, temperature=0.5, extra_body={"top_k": 3, "temperature": 1.0})
    (body,) = server.bodies
    assert body == {
        "model": "ok",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 3,
    }


@pytest.mark.parametrize("name", ["PYPTO_SERVING_API_KEY", "OPENAI_API_KEY"])
def test_api_key_is_sent(server, monkeypatch, name):
    monkeypatch.setenv(name, "secret")
    send(server.url, "ok")
    assert server.headers[0][b"authorization"] == b"Bearer secret"


def test_without_usage_chunks_are_counted(server):
    (record,) = send(server.url, "no_usage")
    assert (record.prompt_tokens, record.output_tokens) == (3, 4)


def test_slow_stream(server):
    (record,) = send(server.url, "slow")
    assert record.error == "" and record.output_tokens == 3 and len(record.itls_s) == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("server_error", "HTTP 500: the engine died"),
        ("busy", "HTTP 429: queue full"),
        ("error_in_stream", "error in the stream: lost the worker"),
        ("cut", "the stream ended after 1 chunk, before finish_reason or [DONE]"),
        ("unfinished", "the stream ended after 2 chunks, before finish_reason or [DONE]"),
        ("not_a_stream", "the stream ended after 0 chunks, before finish_reason or [DONE]"),
        ("garbage", "a chunk is not what OpenAI sends"),
    ],
)
def test_failures_keep_their_message_and_no_latency(server, model, message):
    for record in send(server.url, model, count=2):
        assert record.error.startswith(message)
        assert (record.output_tokens, record.ttft_s, record.latency_s, record.itls_s) == (0, 0, 0, [])


def test_timeout_is_a_failure(server):
    (record,) = send(server.url, "hang", timeout_s=0.05)
    assert record.error == "no complete reply within --timeout 0.05 s"


def test_connection_refused_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (record,) = send(f"http://127.0.0.1:{port}", "ok")
    assert record.error.startswith("connection failed: ")


def test_closed_idle_connection_is_replaced():
    """The peer answers one request per connection and closes it without announcing that."""
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\ndata: [DONE]\n\n"
    connections = 0

    async def answer(reader, writer):
        nonlocal connections
        connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(reply)
        await reader.readuntil(b"\r\n\r\n")  # the next request is read, then dropped
        writer.close()

    async def main():
        peer = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{peer.sockets[0].getsockname()[1]}"
        client = ApiClient(Target(base_url=url), "m")
        records = [await client.send(client.encode(PROMPT), 3) for _ in range(3)]
        client.close()
        peer.close()
        return records

    assert [r.error for r in asyncio.run(main())] == ["", "", ""]
    assert connections == 3


def test_not_http_is_a_failure():
    async def main():
        async def answer(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            await reader.read()
            writer.close()

        peer = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{peer.sockets[0].getsockname()[1]}"
        client = ApiClient(Target(base_url=url), "m")
        record = await client.send(client.encode(PROMPT), 3)
        peer.close()
        return record

    assert asyncio.run(main()).error.startswith("connection failed: the reply is not HTTP")


TEXT = b'data: {"choices": [{"text": "ab", "finish_reason": null}]}\n\n'
EMPTY = b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n'
FINISH = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'


def parse(*events):
    """The record of (arrival second, bytes) pairs, sent at second 10."""
    parser = ReplyParser(10.0, 1)
    for now_s, data in events:
        parser.feed(200, data, now_s)
    return parser.finish(200)


def test_times_by_hand():
    record = parse((11.0, EMPTY), (12.0, TEXT), (12.5, TEXT), (12.5, EMPTY), (14.5, TEXT), (15.0, FINISH))
    assert record.ttft_s == 2.0
    assert record.itls_s == [0.5, 2.0]
    assert record.latency_s == 5.0
    assert record.output_tokens == 3


def test_usage_after_the_finish_does_not_extend_the_latency():
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}\n\n'
    record = parse((12.0, TEXT), (13.0, FINISH), (17.0, usage), (18.0, b"data: [DONE]\n\n"))
    assert (record.latency_s, record.output_tokens, record.prompt_tokens) == (3.0, 6, 9)
    assert record.tpot_s == pytest.approx(1.0 / 5)


def test_choices_are_told_apart():
    """The text is that of the first, gaps are those within each, and the reply ends with its last choice."""
    other = TEXT.replace(b'"text": "ab"', b'"index": 1, "text": "cd"')
    last = FINISH.replace(b'"text": ""', b'"index": 1, "text": ""')
    events = [(11.0, TEXT), (12.0, other), (12.5, TEXT), (14.0, other), (14.0, FINISH), (15.0, last)]
    record = parse(*events)
    assert (record.text, record.ttft_s, record.itls_s) == ("abab", 1.0, [1.5, 2.0])
    assert (record.latency_s, record.output_tokens) == (5.0, 4)
    assert "before finish_reason" in parse(*events[:-1]).error


def test_reply_without_visible_text_counts_from_its_finish():
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
    record = parse((12.0, FINISH), (12.0, usage))
    assert record.error == "" and record.ttft_s == record.latency_s == 2.0
    assert record.output_tokens == 1


@pytest.mark.parametrize(
    "delta",
    [
        b'{"content": "x"}',
        b'{"reasoning_content": "x"}',
        b'{"reasoning": "x"}',
        b'{"content": null, "tool_calls": [{"index": 0}]}',
    ],
)
def test_chat_content_of_every_kind_counts(delta):
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": "", "tool_calls": null}}]}\n\n'
    chunk = b'data: {"choices": [{"delta": ' + delta + b"}]}\n\n"
    record = parse((11.0, role), (12.0, chunk), (13.0, chunk), (13.0, b"data: [DONE]\n\n"))
    assert (record.ttft_s, record.itls_s, record.output_tokens) == (2.0, [1.0], 2)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_any_split_of_the_bytes_gives_the_same_record(newline):
    stream = b": ping\n\n" + TEXT + EMPTY + TEXT + FINISH + b"data: [DONE]\n\n"
    stream = stream.replace(b"\n", newline)
    whole = parse((11.0, stream))
    for cut in range(len(stream)):
        assert parse((11.0, stream[:cut]), (11.0, stream[cut:])) == whole
    assert whole.text == "abab" and whole.error == ""


def find(server_url, model=None):
    return asyncio.run(find_model(Target(base_url=server_url, model=model)))


def test_find_model(server):
    card = find(server.url)
    assert (card.id, card.vocab_size) == ("ok", 100)
    with pytest.raises(BenchmarkError, match="does not list other; it serves: ok"):
        find(server.url, "other")


def test_find_model_tells_what_is_wrong(server):
    server.model_card = {"name": "no id"}
    with pytest.raises(BenchmarkError, match="not a list of models"):
        find(server.url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BenchmarkError, match="is the server up"):
        find(f"http://127.0.0.1:{port}")
