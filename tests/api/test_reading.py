"""Bodies that take long to read, from the client's side: others are served meanwhile, and nothing outlasts its time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pypto_serving.api.openai.body import Endpoint, ReadBody
from pypto_serving.api.openai.reader import BodyReader
from pypto_serving.api.openai.schemas import MAX_MESSAGES
from pypto_serving.api.reading import process
from pypto_serving.api.reading.__main__ import answer
from pypto_serving.api.reading.process import ReaderProcess
from pypto_serving.api.reading.reading import QUICK_BYTES, SMALL_BYTES
from pypto_serving.api.reading.wire import ANSWERS, Fault
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError, UnavailableError
from tests.api.bad_bodies import BAD_CHATS, BAD_COMPLETIONS, HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, engine_config

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}spam{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text": "{{ 'x' * 99999999999 }}",
    "numbers": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "range": "{{ range(9999999999) | list }}",
    "recursion": "{% macro g() %}{{ g() }}{% endmacro %}{{ g() }}",
}
CASES = "".join(f"{{% if messages[0].content == '{name}' %}}{text}{{% endif %}}" for name, text in HOSTILE.items())


PARTS = [{"type": "text", "text": "x" * 30}] * 80_000


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{**HELLO, "content": content}], "max_tokens": 2}


def served_until(server: RunningServer, slow: Future[httpx.Response]) -> int:
    """How often /health and a small completion are answered before `slow` is."""
    count = 0
    while not slow.done():
        assert server.http.get("/health").status_code == 200
        assert server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1}).status_code == 200
        count += 1
    return count


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose chat template attacks it. Stopping it ends its readers, whatever they do."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hostile"), template=CASES + CHATML)
    before = set(psutil.Process().children())
    server = RunningServer(new_engine(Tokenizer.load(folder)), load_serving_config(folder))
    yield server
    with ThreadPoolExecutor(1) as other:
        last = other.submit(server.post, CHAT, chat("loops"))
        served_until_begun(server)
        server.stop()
        last.cancel()
        assert isinstance(last.exception(WAIT_S), httpx.HTTPError) or last.result().status_code >= 400
    assert not set(psutil.Process().children()) - before


def served_until_begun(server: RunningServer) -> None:
    while not server.call(server.app.state.reading._quick._turn.locked):
        pass


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_not_end_costs_its_own_chat_only(
    hostile: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "READ_S", 1.0)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(hostile.post, CHAT, chat(name))
        served_until(hostile, slow)
        response = slow.result()
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("messages", None)
    monkeypatch.setattr(process, "READ_S", 20.0)
    assert hostile.post(CHAT, chat("hello")).status_code == 200


BIG = {
    "prompts": (COMPLETIONS, {"prompt": ["fox jumps over " * 1000] * 200, "max_tokens": 1}, 200, "text_completion"),
    "choices": (COMPLETIONS, {"prompt": ["fox jumps over " * 1000] * 513}, 400, "513 sequences"),
    "ids": (COMPLETIONS, {"prompt": [0] * 1_500_000}, 400, "1500000 tokens"),
    "nested": (COMPLETIONS, {"prompt": [[[[[[0]]]]]] * 100_000}, 400, "100000 sequences"),
    "messages": (CHAT, {"messages": [HELLO] * 100_000}, 400, f"at most {MAX_MESSAGES} items"),
    "parts": (CHAT, {"messages": [{**HELLO, "content": PARTS}]}, 400, "characters, which cannot fit"),
    "values": (COMPLETIONS, {"prompt": [[0]] * 1_100_000}, 400, "more than 2000000 commas and opening brackets"),
    "fields": (COMPLETIONS, {"prompt": "a", **{f"x{i}": 1 for i in range(50_000)}}, 200, "text_completion"),
}


@pytest.fixture(scope="module")
def roomy(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    server = RunningServer(new_engine(tokenizer, max_model_len=8192), load_serving_config(checkpoint))
    yield server
    server.stop()


@pytest.mark.parametrize("name", BIG)
def test_others_are_served_while_a_large_body_is_read(roomy: RunningServer, name: str) -> None:
    path, body, status, words = BIG[name]
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(roomy.http.post, path, content=json.dumps(body))
        served = served_until(roomy, slow)
    assert slow.result().status_code == status
    assert words in slow.result().text
    assert served > 1


BODIES = [(COMPLETIONS, body) for body, *_ in BAD_COMPLETIONS] + [(CHAT, body) for body, *_ in BAD_CHATS]
BODIES += [(COMPLETIONS, {"prompt": ["hello", [5, 6]], "n": 2, "seed": 1}), (CHAT, chat("hello"))]


def test_a_body_says_the_same_wherever_it_is_read(roomy: RunningServer) -> None:
    """White space makes a body large enough for either reader."""

    def said(response: httpx.Response) -> Any:
        answer = response.json()
        return response.status_code, answer.get("error") or (answer["choices"], answer["usage"])

    for path, body in BODIES:
        raw = json.dumps(body).encode()
        first = said(roomy.http.post(path, content=raw))
        for size in (SMALL_BYTES, QUICK_BYTES):
            assert said(roomy.http.post(path, content=raw + b" " * size)) == first


def test_an_error_of_ours_reaches_the_log_of_the_api_process() -> None:
    class Broken(BodyReader):
        def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> ReadBody:
            raise ZeroDivisionError(raw)

    fault = ANSWERS.decode(answer(Broken.__new__(Broken), "chat", b"x"))
    assert isinstance(fault, Fault)
    assert "ZeroDivisionError: b'x'" in fault.traceback


def test_parameters_come_from_a_reader_once(roomy: RunningServer) -> None:
    """However many prompts there are; and the core gets no stop strings."""
    stops = [f"{i:04}" + "s" * 1000 for i in range(16)]
    raw = json.dumps({"prompt": [[1]] * 200, "stop": stops, "stop_token_ids": list(range(1000))}).encode()
    service = roomy.service
    reader = BodyReader(service.prompter, service.serving)
    assert len(answer(reader, "completions", raw)) < 2 * len(raw)


def new_reader(checkpoint: Path, tokenizer: Tokenizer) -> ReaderProcess:
    return ReaderProcess(engine_config(tokenizer.raw.get_vocab_size()), load_serving_config(checkpoint))


def completion(prompt: list[int], size: int = 0) -> bytes:
    return json.dumps({"prompt": prompt}).encode() + b" " * size


def test_a_client_that_leaves_takes_no_turn_and_gets_nobody_elses_answer(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        begun = asyncio.ensure_future(reader.read("completions", completion([1], 10_000_000)))
        waits = asyncio.ensure_future(reader.read("completions", completion([2])))
        while not reader._turn.locked():
            await asyncio.sleep(0)
        begun.cancel()
        waits.cancel()
        for i in (3, 4):
            body = await reader.read("completions", completion([i]))
            assert list(body.prompts[0].token_ids) == [i]
        await reader.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "ended unexpectedly"), (signal.SIGABRT, "too much memory")]
)
def test_a_reader_that_dies_costs_one_request_and_is_replaced(
    checkpoint: Path, tokenizer: Tokenizer, number: signal.Signals, words: str
) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        assert reader._child is not None
        os.kill(reader._child.pid, signal.SIGSTOP)
        reading = asyncio.ensure_future(reader.read("completions", completion([1])))
        while not reader._turn.locked():
            await asyncio.sleep(0)
        os.kill(reader._child.pid, number)
        os.kill(reader._child.pid, signal.SIGCONT)
        with pytest.raises(RequestError, match=words):
            await reading
        assert list((await reader.read("completions", completion([2]))).prompts[0].token_ids) == [2]
        os.kill(reader._child.pid, number)  # idle: this costs nobody anything
        os.waitid(os.P_PID, reader._child.pid, os.WEXITED | os.WNOWAIT)
        assert list((await reader.read("completions", completion([3]))).prompts[0].token_ids) == [3]
        await reader.close()
        with pytest.raises(UnavailableError):
            await reader.read("completions", completion([3]))

    asyncio.run(scenario())
