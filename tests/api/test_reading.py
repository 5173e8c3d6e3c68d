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
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from pypto_serving import limits
from pypto_serving.api.common.body import MAX_MESSAGES, ReadBody
from pypto_serving.api.reading.__main__ import Jobs, answer_all, guarded
from pypto_serving.api.reading.body_reader import READERS
from pypto_serving.api.reading.process import Reader, ReaderQueue
from pypto_serving.api.reading.reading import SMALL_BYTES, is_small
from pypto_serving.api.reading.wire import JobKind, ReaderFault, ReaderStart
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import QueueFullError, RequestError, UnavailableError
from pypto_serving.processes import COPY_NUMBER, serve_copies
from tests.api.bad_bodies import BAD_CHATS, BAD_COMPLETIONS, HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer, is_served_until
from tests.api.scripted_engine import WAIT_S, engine_config
from tests.thinning import some

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}spam{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text": "{{ 'x' * 99999999999 }}",
    "numbers": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "range": "{{ range(9999999999) | list }}",
    "adding": "{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "padding": "{% for i in range(999) %}{{ 'x'.center(1000000) }}{{ 'x' | center(1000000) }}{% endfor %}",
    "widths": "{% for i in range(3000) %}{{ '%01000000d' % 1 }}{% endfor %}",
    "sums": "{% for i in range(3000) %}{{ range(99999) | sum }}{% endfor %}",
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
        server.wait_for(lambda: server.app.state.reading._reader.is_running)
        server.stop()
        last.cancel()
        assert isinstance(last.exception(WAIT_S), httpx.HTTPError) or last.result().status_code >= 400
    assert not set(psutil.Process().children()) - before


@pytest.mark.parametrize("name", some(HOSTILE, "loops", "macros", "text", "doubling", "range", "squares", "recursion"))
def test_a_template_that_does_not_end_costs_its_own_chat_only(
    hostile: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hostile.post(CHAT, chat("hello")).status_code == 200, "the reader has started, if it is ever needed"
    monkeypatch.setattr(limits, "CPU_S", 0.5)
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(hostile.post, CHAT, chat(name))
        assert is_served_until(hostile, slow)
        response = slow.result()
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("messages", None)
    assert hostile.post(CHAT, chat("hello")).status_code == 200


def test_small_chats_are_read_without_a_reader(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """It starts with the first body that may take long, and ends when it was idle for long."""
    server = RunningServer(new_engine(tokenizer), load_serving_config(checkpoint))
    reader = server.app.state.reading._reader
    assert server.post(CHAT, chat("hello")).status_code == 200
    assert reader.child is None
    padded = json.dumps(chat("hello")).encode() + b" " * SMALL_BYTES
    assert server.http.post(CHAT, content=padded).status_code == 200
    child = reader.child
    assert child is not None
    server.call(reader._end_idle)
    server.wait_for(lambda: child.process.returncode is not None)
    assert server.http.post(CHAT, content=padded).status_code == 200
    server.stop()


def test_a_chat_that_takes_long_does_not_hold_up_others(
    hostile: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done by a copy of the reader, which ends alone; one that is killed is started once more."""
    monkeypatch.setattr(limits, "CPU_S", 20.0)
    reader = hostile.app.state.reading._reader
    padded = json.dumps(chat("hello")).encode() + b" " * SMALL_BYTES
    assert hostile.http.post(CHAT, content=padded).status_code == 200
    child, killed = reader.child, set[int]()
    (working,) = copies_of(reader)
    with ThreadPoolExecutor(1) as others:
        long = others.submit(hostile.post, CHAT, chat("loops"))
        hostile.wait_for(lambda: reader.is_running)
        for _ in range(3):
            assert hostile.post(CHAT, chat("hello")).status_code == 200
            assert hostile.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_regex": "a"}).status_code == 200
        of_grammars = copies_of(reader) - {working}
        for _ in range(2):
            hostile.wait_for(lambda: copies_of(reader) - of_grammars - killed)
            (working,) = copies_of(reader) - of_grammars - killed
            killed.add(working)
            os.kill(working, signal.SIGKILL)
        assert long.result(WAIT_S).status_code == 500
    assert reader.child is child and child.process.poll() is None, "only copies end"


def copies_of(reader: Reader) -> set[int]:
    """The processes that do its jobs."""
    return set() if reader.child is None else {each.pid for each in psutil.Process(reader.child.pid).children()}


BIG = {
    "prompts": (COMPLETIONS, {"prompt": ["fox jumps over " * 1000] * 80, "max_tokens": 1}, 200, "text_completion"),
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


@pytest.mark.parametrize("name", some(BIG, "prompts", "ids", "parts", "fields"))
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
    """White space makes a body large enough for the reader."""

    def said(response: httpx.Response) -> Any:
        answer = response.json()
        return response.status_code, answer.get("error") or (answer["choices"], answer["usage"])

    for path, body in BODIES:
        raw = json.dumps(body).encode()
        first = said(roomy.http.post(path, content=raw))
        assert said(roomy.http.post(path, content=raw + b" " * SMALL_BYTES)) == first


def test_an_error_of_ours_reaches_the_log_of_the_api_process() -> None:
    """A panic of native code too, which is no Exception."""

    class Panic(BaseException):
        pass

    for kind in (ZeroDivisionError, Panic):

        def fail(raw: bytes, kind: type[BaseException] = kind) -> msgspec.Struct:
            raise kind(raw)

        fault, is_last = guarded(fail, b"x")
        assert isinstance(fault, ReaderFault) and is_last
        assert f"{kind.__name__}: b'x'" in fault.traceback


def test_parameters_come_from_a_reader_once(roomy: RunningServer) -> None:
    """However many prompts there are; and the core gets no stop strings."""
    stops = [f"{i:04}" + "s" * 1000 for i in range(16)]
    raw = json.dumps({"prompt": [[1]] * 200, "stop": stops, "stop_token_ids": list(range(1000))}).encode()
    service = roomy.service
    read = Jobs(ReaderStart(service.prompter.config, service.serving, -1)).prepared("completions")
    assert len(msgspec.msgpack.encode(read(raw))) < 2 * len(raw)


def new_reader(checkpoint: Path, tokenizer: Tokenizer) -> Reader:
    return Reader(engine_config(tokenizer.raw.get_vocab_size()), load_serving_config(checkpoint))


def completion(prompt: list[int], size: int = 0) -> bytes:
    return json.dumps({"prompt": prompt}).encode() + b" " * size


async def ask(reader: Reader, kind: JobKind, raw: bytes) -> Any:
    return await reader.at_turn("bodies", "", partial(reader.do, "bodies", "", kind, raw))


async def ids_of(reader: Reader, prompt: list[int], size: int = 0) -> list[int]:
    body = await ask(reader, "completions", completion(prompt, size))
    assert isinstance(body, ReadBody)
    return list(body.prompts[0].token_ids)


def test_a_client_that_leaves_takes_no_turn_and_gets_nobody_elses_answer(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        begun = [asyncio.ensure_future(ids_of(reader, [1], 10_000_000))]
        waits = asyncio.ensure_future(ids_of(reader, [2]))
        while not len(reader.queues["bodies"]):
            await asyncio.sleep(0)
        for each in (*begun, waits):
            each.cancel()
        for i in (3, 4):
            assert await ids_of(reader, [i]) == [i]
        await reader.close()

    asyncio.run(scenario())


@pytest.mark.thinned(1)
@pytest.mark.parametrize("whom", ["the copy", "the reader"])
@pytest.mark.parametrize(
    ("number", "times", "words"),
    [
        (signal.SIGKILL, 1, None),
        (signal.SIGKILL, 2, "ended unexpectedly"),
        (signal.SIGABRT, 1, "too much memory"),
        (signal.SIGSEGV, 1, "too much memory"),
    ],
)
def test_a_reader_that_dies_costs_one_request_at_most_and_is_replaced(
    checkpoint: Path, tokenizer: Tokenizer, number: signal.Signals, times: int, words: str | None, whom: str
) -> None:
    """A body whose reader was killed, which may be nobody's fault, is read once more."""

    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        assert await ids_of(reader, [1]) == [1]
        reading, last = asyncio.ensure_future(ids_of(reader, [1], 20_000_000)), 0
        for _ in range(times):
            while reader.queues["bodies"].copy is not None or not (pids := copies_of(reader) - {last}):
                await asyncio.sleep(0.002)  # it has no job yet
            (last,) = pids
            assert Path(f"/proc/{last}/oom_score_adj").read_text() == "1000\n", "it must be the first to go"
            assert reader.child is not None
            os.kill(last if whom == "the copy" else reader.child.pid, number)
        if words is None:
            assert await reading == [1]
        else:
            with pytest.raises(RequestError, match=words):
                await reading
        assert await ids_of(reader, [2]) == [2]
        idle = reader.child
        assert idle is not None
        os.kill(idle.pid, number)  # this costs nobody anything
        while idle.process.returncode is None:  # it is waited for at once, and no zombie until the next body
            await asyncio.sleep(0.002)
        assert await ids_of(reader, [3]) == [3]
        await reader.close()
        with pytest.raises(UnavailableError):
            await ids_of(reader, [3])

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


def test_a_reader_whose_server_is_gone_ends_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    job, end = socket.socketpair()
    jobs: Any = SimpleNamespace(prepared=lambda kind: lambda raw: None)
    socket.send_fds(ours, [COPY_NUMBER.pack(1)], [end.fileno()])
    for each in (job, end, ours):
        each.close()
    with theirs:
        serve_copies(theirs, lambda purpose: lambda end: answer_all(jobs, end))
    os.wait()
    assert capfd.readouterr() == ("", "")


def test_a_reader_whose_parent_ignores_its_children_waits_for_its_copies(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """An ignored signal stays ignored in a process that is started; then no copy could be waited for."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:

        async def scenario() -> None:
            reader = new_reader(checkpoint, tokenizer)
            assert await ids_of(reader, [1]) == [1]
            await reader.close()

        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_no_reader_starts_while_the_server_ends(
    checkpoint: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is one that is still starting then an error."""

    async def scenario() -> None:
        reader = new_reader(checkpoint, tokenizer)
        starting = asyncio.ensure_future(ids_of(reader, [1]))
        while reader.child is None:
            await asyncio.sleep(0)
        child = reader.child
        await reader.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await starting
        assert child.process.returncode is not None
        with pytest.raises(UnavailableError, match="shutting down"):
            await ids_of(reader, [1])

    asyncio.run(scenario())
    assert not caplog.records


def test_bodies_of_many_prompts_are_not_small() -> None:
    """They take longer to read than others of their size."""
    assert is_small(json.dumps({"prompt": "x" * 16_000, "stop": ["a", "b"]}).encode())
    assert not is_small(json.dumps({"prompt": [[1]] * 500}).encode())
    assert not is_small(json.dumps({"prompt": ["a"] * 500}).encode())
    assert not is_small(json.dumps({f"x{i}": 1 for i in range(500)}).encode())


def test_a_full_server_reads_no_body(start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    server.engine.refusal = QueueFullError("the queue is full", 7)
    monkeypatch.delitem(READERS, "completions")
    for size in (0, SMALL_BYTES):
        assert server.http.post(COMPLETIONS, content=completion([1], size)).status_code == 429
    assert server.app.state.reading._reader.child is None


MAX_WAITING = 8


class Waiting:
    """Jobs that wait for a reader whose copy is at work for the host "busy"."""

    def __init__(self) -> None:
        self.queue, self.order = ReaderQueue(MAX_WAITING), list[str]()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def fill(self) -> None:
        await self.queue.take_turn("busy")

    async def add(self, *hosts: str) -> None:
        for host in hosts:
            name = f"{host}{sum(each.startswith(host) for each in self.tasks)}"
            self.tasks[name] = asyncio.create_task(self.run(name, host))
        await asyncio.sleep(0)

    async def run(self, name: str, host: str) -> None:
        try:
            await self.queue.take_turn(host)
        except QueueFullError:
            self.order.append(f"{name} refused")
        else:
            self.order.append(name)

    async def end(self, host: str, used_s: float) -> None:
        self.queue.charge(host, used_s)
        self.queue.end_turn()
        await asyncio.sleep(0)


def test_the_host_that_used_the_least_time_is_next() -> None:
    async def scenario() -> list[str]:
        waiting = Waiting()
        await waiting.fill()
        await waiting.add("busy", "busy", "a", "c", "a")
        await waiting.end("busy", 1.0)
        for host, used_s in (("a", 0.1), ("c", 5.0), ("a", 0.1), ("busy", 1.0), ("busy", 1.0)):
            await waiting.end(host, used_s)
        await asyncio.gather(*waiting.tasks.values())
        return waiting.order

    assert asyncio.run(scenario()) == ["a0", "c0", "a1", "busy0", "busy1"]


def test_the_newest_job_of_the_host_with_most_is_refused_when_too_many_wait() -> None:
    async def scenario() -> list[str]:
        waiting = Waiting()
        await waiting.fill()
        await waiting.add(*["many"] * (MAX_WAITING - 1), "few", "few", "other")
        await asyncio.sleep(0)
        for task in waiting.tasks.values():
            task.cancel()
        await asyncio.gather(*waiting.tasks.values(), return_exceptions=True)
        assert not len(waiting.queue)
        return waiting.order

    assert asyncio.run(scenario()) == [f"many{MAX_WAITING - 2} refused", f"many{MAX_WAITING - 3} refused"]


def test_a_turn_that_comes_while_its_client_leaves_is_passed_on() -> None:
    async def scenario() -> None:
        waiting = Waiting()
        await waiting.fill()
        await waiting.add("first", "second")
        waiting.queue.end_turn()
        waiting.tasks["first0"].cancel()
        await asyncio.wait_for(waiting.tasks["second0"], WAIT_S)
        waiting.queue.end_turn()
        assert waiting.tasks["first0"].cancelled() and not waiting.queue.is_running

    asyncio.run(scenario())


def test_clients_that_keep_the_reader_busy_do_not_hold_up_a_longer_body(roomy: RunningServer) -> None:
    """Eight of them, each of which has the next body read as soon as the last is answered."""
    text = "fox jumps over " * 1000
    short, long = ({"prompt": [text] * count, "max_tokens": 1} for count in (3, 16))
    assert SMALL_BYTES < len(json.dumps(short)) < len(json.dumps(long))
    answered = threading.Event()

    def keep_busy(_: int) -> int:
        count = 0
        while count < 40 and not answered.is_set():
            assert roomy.post(COMPLETIONS, short).status_code == 200
            count += 1
        return count

    with ThreadPoolExecutor(8) as others:
        counts = others.map(keep_busy, range(8))
        roomy.wait_for(lambda: len(roomy.app.state.reading._reader.queues["bodies"]) >= 4)
        assert roomy.post(COMPLETIONS, long).status_code == 200
        answered.set()
        assert sum(counts) < 8 * 20
