"""Bodies that take long to read, from the client's side: others are served meanwhile, and nothing outlasts its time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from pypto_serving.api.common.body import MAX_MESSAGES, Endpoint, ReadBody
from pypto_serving.api.reading import bodies, loop
from pypto_serving.api.reading.__main__ import answer
from pypto_serving.api.reading.bodies import BodyProcess
from pypto_serving.api.reading.loop import guarded
from pypto_serving.api.reading.reader import BodyReader
from pypto_serving.api.reading.reading import QUICK_BYTES, SMALL_BYTES, is_small
from pypto_serving.api.reading.turns import OLDEST_EVERY, Turns
from pypto_serving.api.reading.wire import Fault
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import QueueFullError, RequestError, UnavailableError
from pypto_serving.processes import Child
from tests.api.bad_bodies import BAD_CHATS, BAD_COMPLETIONS, HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer, is_served_until
from tests.api.scripted_engine import WAIT_S, engine_config

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


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose chat template attacks it. Stopping it ends its readers, whatever they do."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hostile"), template=CASES + CHATML)
    before = set(psutil.Process().children())
    server = RunningServer(new_engine(Tokenizer.load(folder)), load_serving_config(folder))
    yield server
    with ThreadPoolExecutor(1) as other:
        last = other.submit(server.post, CHAT, chat("loops"))
        server.wait_for(lambda: server.app.state.reading._quick.turns.taken)
        server.stop()
        last.cancel()
        assert isinstance(last.exception(WAIT_S), httpx.HTTPError) or last.result().status_code >= 400
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_not_end_costs_its_own_chat_only(
    hostile: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "QUICK_S", 0.2)
    monkeypatch.setattr(bodies, "READ_S", 0.3)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(hostile.post, CHAT, chat(name))
        assert is_served_until(hostile, slow)
        response = slow.result()
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("messages", None)
    monkeypatch.setattr(bodies, "QUICK_S", 20.0)
    assert hostile.post(CHAT, chat("hello")).status_code == 200


def test_a_chat_that_takes_long_does_not_hold_up_others(hostile: RunningServer) -> None:
    """They wait until the quick reader gives it up, but for no start of a process."""
    quick, slow = hostile.app.state.reading._quick, hostile.app.state.reading._slow
    assert hostile.post(CHAT, chat("hello")).status_code == 200
    reader = quick.process._child
    with ThreadPoolExecutor(2) as others:
        long = others.submit(hostile.post, CHAT, chat("loops"))
        hostile.wait_for(lambda: quick.turns.taken)
        beside = others.submit(hostile.post, CHAT, chat("hello"))
        hostile.wait_for(lambda: slow.turns.taken)
        for _ in range(3):
            assert hostile.post(CHAT, chat("hello")).status_code == 200
        assert beside.result(WAIT_S).status_code == 200
        assert slow.turns.taken and not long.done()
        assert quick.process._child is reader and reader.process.poll() is None, "only its copy ends"
        for _ in range(2):
            hostile.wait_for(lambda: slow.process._output)  # it has started
            killed = slow.process._child
            os.kill(killed.pid, signal.SIGKILL)
            hostile.wait_for(lambda killed=killed: slow.process._child is not killed)
        assert long.result(WAIT_S).status_code == 500


BIG = {
    "prompts": (COMPLETIONS, {"prompt": ["fox jumps over " * 1000] * 200, "max_tokens": 1}, 200, "text_completion"),
    "choices": (COMPLETIONS, {"prompt": ["fox jumps over " * 1000] * 513}, 400, "513 sequences"),
    "ids": (COMPLETIONS, {"prompt": [0] * 1_500_000}, 400, "1500000 tokens"),
    "nested": (COMPLETIONS, {"prompt": [[[[[[0]]]]]] * 100_000}, 400, "100000 sequences"),
    "messages": (CHAT, {"messages": [HELLO] * 100_000}, 400, f"at most {MAX_MESSAGES} entries"),
    "parts": (CHAT, {"messages": [{**HELLO, "content": PARTS}]}, 400, "characters, more than 256 for each"),
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
        assert is_served_until(roomy, slow)
    assert slow.result().status_code == status
    assert words in slow.result().text


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

    fault = guarded(partial(answer, Broken.__new__(Broken)), 1, b"x")
    assert isinstance(fault, Fault)
    assert "ZeroDivisionError: b'x'" in fault.traceback


def test_a_panic_of_native_code_reaches_it_too() -> None:
    """It is no Exception."""

    class Panic(BaseException):
        pass

    def panic(kind: int, raw: bytes) -> msgspec.Struct:
        raise Panic(raw)

    fault = guarded(panic, 1, b"x")
    assert isinstance(fault, Fault)
    assert "Panic: b'x'" in fault.traceback


def test_parameters_come_from_a_reader_once(roomy: RunningServer) -> None:
    """However many prompts there are; and the core gets no stop strings."""
    stops = [f"{i:04}" + "s" * 1000 for i in range(16)]
    raw = json.dumps({"prompt": [[1]] * 200, "stop": stops, "stop_token_ids": list(range(1000))}).encode()
    service = roomy.service
    reader = BodyReader(service.prompter, service.serving)
    assert len(msgspec.msgpack.encode(answer(reader, 0, raw))) < 2 * len(raw)


def new_reader(checkpoint: Path, tokenizer: Tokenizer) -> BodyProcess:
    return BodyProcess(engine_config(tokenizer.raw.get_vocab_size()), load_serving_config(checkpoint))


def completion(prompt: list[int], size: int = 0) -> bytes:
    return json.dumps({"prompt": prompt}).encode() + b" " * size


def test_a_client_that_leaves_takes_no_turn_and_gets_nobody_elses_answer(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        begun = asyncio.ensure_future(reader.read("completions", completion([1], 10_000_000), WAIT_S))
        waits = asyncio.ensure_future(reader.read("completions", completion([2]), WAIT_S))
        while not reader.turns.taken:
            await asyncio.sleep(0)
        begun.cancel()
        waits.cancel()
        for i in (3, 4):
            body = await reader.read("completions", completion([i]), WAIT_S)
            assert list(body.prompts[0].token_ids) == [i]
        await reader.close()

    asyncio.run(scenario())


async def in_work(reader: BodyProcess) -> Child:
    """The process that a body is being written to."""
    while reader.process._output is None or not reader.process._output.transport.get_write_buffer_size():
        await asyncio.sleep(0)
    assert reader.process._child is not None
    return reader.process._child


@pytest.mark.parametrize(
    ("number", "times", "words"),
    [
        (signal.SIGKILL, 1, None),
        (signal.SIGKILL, 2, "ended unexpectedly"),
        (signal.SIGABRT, 1, "too much memory"),
    ],
)
def test_a_reader_that_dies_costs_one_request_at_most_and_is_replaced(
    checkpoint: Path, tokenizer: Tokenizer, number: signal.Signals, times: int, words: str | None
) -> None:
    """A body whose reader was killed, which may be nobody's fault, is read once more."""

    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        reading = asyncio.ensure_future(reader.read("completions", completion([1], 10_000_000), WAIT_S))
        for _ in range(times):
            child = await in_work(reader)
            score = Path(f"/proc/{child.pid}/oom_score_adj").read_text()
            assert score == "1000\n", "it must be the first to go"
            os.kill(child.pid, number)
            while reader.process._child is child:
                await asyncio.sleep(0)
        if words is None:
            assert list((await reading).prompts[0].token_ids) == [1]
        else:
            with pytest.raises(RequestError, match=words):
                await reading
        assert list((await reader.read("completions", completion([2]), WAIT_S)).prompts[0].token_ids) == [2]
        idle = reader.process._child
        assert idle is not None
        os.kill(idle.pid, number)  # this costs nobody anything
        while idle.process.returncode is None:  # it is waited for at once, and no zombie until the next body
            await asyncio.sleep(0)
        assert list((await reader.read("completions", completion([3]), WAIT_S)).prompts[0].token_ids) == [3]
        await reader.close()
        with pytest.raises(UnavailableError):
            await reader.read("completions", completion([3]), WAIT_S)

    asyncio.run(scenario())


def test_a_copy_that_is_killed_costs_no_request(checkpoint: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        reading = asyncio.ensure_future(reader.read("completions", completion([1], 10_000_000), WAIT_S))
        process = psutil.Process((await in_work(reader)).pid)
        while not (copies := process.children()):
            await asyncio.sleep(0)
        copies[0].kill()
        assert list((await reading).prompts[0].token_ids) == [1]
        await reader.close()

    asyncio.run(scenario())


def test_a_copy_ends_with_its_process_even_before_it_could_say_so() -> None:
    program = """
import os, signal
from pypto_serving import processes

def too_late():
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        pass

parent, processes.die_with_parent = os.getpid(), too_late
processes.Copy(lambda: print("works alone", flush=True)).wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_reader_that_starts_when_the_server_is_gone_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(SystemExit) as ended:
        loop.open_channel(theirs.detach())
    assert ended.value.code is None


def test_no_reader_starts_while_the_server_ends(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """It had died, and the next request found that out just then."""

    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        await reader.start()
        assert reader.process._child is not None
        reader.process._child.process.kill()
        reader.process._child.process.wait()
        starting = asyncio.ensure_future(reader.start())
        while reader.process._child is not None:
            await asyncio.sleep(0)
        await reader.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await starting

    asyncio.run(scenario())


def test_a_reader_that_is_still_starting_when_the_server_ends_is_no_error(
    checkpoint: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        starting = asyncio.ensure_future(reader.start())
        while reader.process._child is None:
            await asyncio.sleep(0)
        await reader.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await starting

    asyncio.run(scenario())
    assert not caplog.records


def test_bodies_of_many_prompts_are_not_small() -> None:
    """They take longer to read than others of their size."""
    assert is_small(json.dumps({"prompt": "x" * 16_000, "stop": ["a", "b"]}).encode())
    assert not is_small(json.dumps({"prompt": [[1]] * 500}).encode())
    assert not is_small(json.dumps({"prompt": ["a"] * 500}).encode())
    assert not is_small(json.dumps({f"x{i}": 1 for i in range(500)}).encode())


def test_a_full_server_reads_no_body(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.engine.refusal = QueueFullError("the queue is full", 7)
    server.app.state.reading._here = None
    for size in (0, SMALL_BYTES, QUICK_BYTES):
        assert server.http.post(COMPLETIONS, content=completion([1], size)).status_code == 429
    assert server.app.state.reading._slow.process._child is None


MAX_WAITING = 8


async def turns_taken(sizes: list[int], leaving: tuple[int, ...] = ()) -> list[int | str]:
    """The sizes in the order of their turns, after one that came before; the errors of those that were refused."""
    turns, order = Turns[int](MAX_WAITING, int, "wait"), list[int | str]()

    async def read(size: int) -> None:
        try:
            await turns.take(size)
        except QueueFullError as error:
            order.append(error.code)
            return
        order.append(size)
        turns.end()

    await turns.take(0)
    tasks = [asyncio.create_task(read(size)) for size in sizes]
    await asyncio.sleep(0)
    for i in leaving:
        tasks[i].cancel()
    turns.end()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not turns.taken
    return order


def test_the_shortest_body_is_next_whatever_came_before() -> None:
    assert asyncio.run(turns_taken([30, 10, 20, 10])) == [10, 10, 20, 30]
    assert asyncio.run(turns_taken([30, 10, 20], leaving=(1,))) == [20, 30]
    assert asyncio.run(turns_taken([30, 10, 20], leaving=(0, 1, 2))) == []


def test_a_long_body_is_not_held_up_by_shorter_ones_for_good() -> None:
    async def turns_before_it() -> int:
        turns = Turns[int](MAX_WAITING, int, "wait")
        await turns.take(0)
        long = asyncio.create_task(turns.take(1000))
        for count in range(100):
            short = asyncio.create_task(turns.take(1))
            await asyncio.sleep(0)
            turns.end()
            await asyncio.wait((short, long), return_when=asyncio.FIRST_COMPLETED)
            if long.done():
                short.cancel()
                return count
        raise AssertionError("it never has its turn")

    assert asyncio.run(turns_before_it()) < OLDEST_EVERY


def test_clients_that_keep_a_reader_busy_do_not_hold_up_a_longer_body(roomy: RunningServer) -> None:
    """Eight of them, each of which has the next body read as soon as the last is answered."""
    text = "fox jumps over " * 1000
    short, long = ({"prompt": [text] * count, "max_tokens": 1} for count in (3, 16))
    assert SMALL_BYTES < len(json.dumps(short)) < len(json.dumps(long)) <= QUICK_BYTES
    answered = threading.Event()

    def keep_busy(_: int) -> int:
        count = 0
        while count < 40 and not answered.is_set():
            assert roomy.post(COMPLETIONS, short).status_code == 200
            count += 1
        return count

    with ThreadPoolExecutor(8) as others:
        counts = others.map(keep_busy, range(8))
        roomy.wait_for(lambda: len(roomy.app.state.reading._quick.turns._waiting) >= 4)
        assert roomy.post(COMPLETIONS, long).status_code == 200
        answered.set()
        assert sum(counts) < 8 * 20


def test_the_longest_body_is_refused_when_too_many_wait() -> None:
    sizes = [1000] * MAX_WAITING + [5, 2000, 7]
    order = asyncio.run(turns_taken(sizes))
    assert order == ["queue_full"] * 3 + [5, 7] + [1000] * (MAX_WAITING - 2)


def test_a_turn_that_comes_while_its_client_leaves_is_passed_on() -> None:
    async def scenario() -> None:
        turns = Turns[int](MAX_WAITING, int, "wait")
        await turns.take(0)
        first, second = (asyncio.create_task(turns.take(size)) for size in (1, 2))
        await asyncio.sleep(0)
        turns.end()
        first.cancel()
        await asyncio.wait([first])
        await asyncio.wait_for(second, WAIT_S)
        turns.end()
        assert first.cancelled() and not turns.taken

    asyncio.run(scenario())
