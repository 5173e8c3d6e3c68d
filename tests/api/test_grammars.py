"""Grammars that take long to compile, from the client's side: nobody waits but those who sent one, and they in turn."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from pypto_serving import guidance, limits, processes
from pypto_serving.api.reading import process, reading
from pypto_serving.api.reading.__main__ import answer_all
from pypto_serving.api.reading.process import QueueName, Reader
from pypto_serving.api.reading.reading import LARGE_BYTES, SMALL_BYTES, Reading
from pypto_serving.api.reading.wire import JOB, KINDS, READY, JobKind
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.processes import COPY_END, COPY_NUMBER, Copy, serve_copies
from pypto_serving.types.guide import Grammar, Guide
from tests.api.bad_bodies import HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S, Script, engine_config

SLOW = {"type": "integer", "multipleOf": 9_999_991}
NUM_SLOW = 6


def slow_schema(number: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": 7_777_777 + number}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose chats go to a reader."""
    folder = write_checkpoint(tmp_path_factory.mktemp("templates"), template=CHATML)
    running = RunningServer(new_engine(Tokenizer.load(folder)), load_serving_config(folder))
    yield running
    running.stop()


def guided(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})


def reader_of(server: RunningServer) -> Reader:
    found: Reader = server.app.state.reading._reader
    return found


@contextmanager
def stopped(reader: Reader) -> Iterator[None]:
    """A reader that stands still."""
    family = suspend(reader)
    yield
    for each in family:
        each.resume()


def suspend(reader: Reader) -> list[psutil.Process]:
    """Stop the reader and its copies."""
    assert reader.child is not None
    process = psutil.Process(reader.child.pid)
    family = [process, *process.children()]
    for each in family:
        each.suspend()
    return family


def test_chats_are_answered_while_grammars_compile(server: RunningServer) -> None:
    """However long a grammar takes: the reader stands still until all chats are answered."""
    reader = reader_of(server)
    assert guided(server, guided_regex="first").status_code == 200
    with ThreadPoolExecutor(NUM_SLOW) as others:
        with stopped(reader):
            slow = [others.submit(guided, server, guided_regex=f"a{i}") for i in range(NUM_SLOW)]
            server.wait_for(lambda: len(reader.queues["grammars"]) == NUM_SLOW - 1)
            for _ in range(3):
                for path, body in ((CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "a"})):
                    assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
            assert guided(server, guided_regex="first").status_code == 200, "it is known to compile"
            assert not any(each.done() for each in slow)
        assert [each.result(WAIT_S).status_code for each in slow] == [200] * NUM_SLOW


def test_equal_grammars_are_compiled_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests bring one at once."""
    assert guided(server, guided_regex="first").status_code == 200
    compiled = asked(monkeypatch)
    with ThreadPoolExecutor(NUM_SLOW) as others:
        with stopped(reader_of(server)):
            same = [others.submit(guided, server, guided_regex="same") for _ in range(NUM_SLOW)]
            server.wait_for(lambda: len(reader_of(server).queues["grammars"]) == NUM_SLOW - 1)
        assert [each.result(WAIT_S).status_code for each in same] == [200] * NUM_SLOW
    assert len(compiled) == 1


def test_grammars_that_take_long_hold_up_no_body(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the same host, and have not ended when others are answered; nor does a large body hold up one."""
    monkeypatch.setattr(limits, "CPU_S", 20.0)
    assert guided(server, guided_regex="first").status_code == 200
    child = reader_of(server).child
    assert child is not None
    padded = {"messages": [HELLO], "max_tokens": 1, "user": "x" * SMALL_BYTES}
    with ThreadPoolExecutor(NUM_SLOW + 1) as others:
        slow = [others.submit(guided, server, guided_json=slow_schema(i)) for i in range(NUM_SLOW)]
        server.wait_for(lambda: len(reader_of(server).queues["grammars"]) == NUM_SLOW - 1)
        (busy,) = psutil.Process(child.pid).children()
        large = others.submit(server.post, CHAT, {"messages": [HELLO] * 16_000, "user": "x" * LARGE_BYTES})
        for _ in range(3):
            assert server.post(CHAT, padded).status_code == 200
        assert not any(each.done() for each in slow)
        monkeypatch.setattr(limits, "CPU_S", 0.1)
        busy.send_signal(signal.SIGPROF)
        assert [each.result(WAIT_S).status_code for each in slow] == [400] * NUM_SLOW
        assert large.result(WAIT_S).status_code == 400
    assert reader_of(server).child is child and child.process.poll() is None, "only copies end"


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that are compiled from now on."""
    found: list[Grammar] = []
    do = Reader.do

    async def counting(self: Reader, name: QueueName, host: str, kind: JobKind, raw: bytes) -> process.Answer:
        if name == "grammars":
            found.append(msgspec.msgpack.decode(raw, type=Grammar))
        return await do(self, name, host, kind, raw)

    monkeypatch.setattr(Reader, "do", counting)
    return found


FIELDS = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW}}},
    "structured_outputs.json": {"structured_outputs": {"json": SLOW}},
    "guided_json": {"guided_json": SLOW},
}


def test_a_grammar_that_takes_too_long_is_named_and_remembered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CPU_S", 0.25)
    monkeypatch.setattr(reading, "CPU_S", 0.25)
    compiled = asked(monkeypatch)
    for field, fields in FIELDS.items():
        response = guided(server, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "reading_timeout")
        assert error["message"].startswith(f"{field}: it took more than 0.25 s of CPU time to compile")
        assert len(compiled) == 1, "a repeat is not compiled"
    assert guided(server, guided_regex="b").status_code == 200


def test_rules_that_nest_more_deeply_than_the_stack_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is recursive there, so it ends its copy, once."""
    compiled, depth = asked(monkeypatch), 10_000
    rules = "start: r0\n" + "".join(f'r{i}: r{i + 1} | "a"\n' for i in range(depth)) + f'r{depth}: "b"\n'
    for _ in range(2):
        response = guided(server, guided_grammar=rules)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "guided_grammar", "request_too_large")
    assert len(compiled) == 1, "a repeat is not compiled"


def test_a_busy_machine_is_not_the_fault_of_a_grammar_or_body(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that stand still get no CPU time. The same requests are good when they come again."""
    padded = {"messages": [HELLO], "max_tokens": 1, "user": "x" * SMALL_BYTES}
    requests = [(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_regex": "busy"}), (CHAT, padded)]
    for path, body in requests:
        assert guided(server, guided_regex=f"idle{path}").status_code == 200
        assert server.post(CHAT, padded).status_code == 200
        suspend(reader_of(server))
        with monkeypatch.context() as impatient:
            impatient.setattr(process, "PATIENCE", 0.02)
            response = server.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (503, "unavailable", None), response.text
        assert int(response.headers["retry-after"]) > 0 and "too busy" in error["message"]
        assert server.post(path, body).status_code == 200


def reading_of(checkpoint: Path) -> Reading:
    """What reads bodies and checks grammars, without a server."""
    prompter: Any = SimpleNamespace(config=engine_config(500))
    return Reading(prompter, load_serving_config(checkpoint), lambda count: None, lambda names: None)


def test_few_grammars_are_remembered(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_KNOWN_CHARS", 480)
    monkeypatch.setattr(guidance, "ENTRY_CHARS", 100)
    compiled = asked(monkeypatch)
    gbnf = [Guide(Grammar("gbnf", f'root ::= "{"a" * 30}{i}"')) for i in range(4)]

    async def scenario() -> None:
        reader = reading_of(checkpoint)
        for i in range(8):
            good, bad = (Guide(Grammar("regex", f"{text}{i}"), field="x") for text in ("a", "(a"))
            checked = await reader.check_guide(good)
            assert checked.grammar == good.grammar
            for _ in range(2):
                compiled.clear()
                with pytest.raises(RequestError, match=r"x: .*unclosed"):
                    await reader.check_guide(bad)
            assert not compiled, "what was refused is known"
        assert len(reader._known) == 4
        for guide in gbnf:
            lark = await reader.check_guide(guide)
            compiled.clear()
            assert lark.grammar is not None and lark.grammar.syntax == "lark"
            assert await reader.check_guide(guide) == lark and not compiled, "what it was translated to is known"
        assert reader._known._num_chars <= 480
        await reader.check_guide(gbnf[0])
        assert compiled == [gbnf[0].grammar], "only so many characters are kept"
        await reader.close()

    asyncio.run(scenario())


ENDS = {
    "takes too long": (lambda raw: next(_ for _ in itertools.count() if _ < 0), -signal.SIGPROF),
    "is killed": (lambda raw: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "exits": (lambda raw: os._exit(3), 3),
}


@pytest.fixture
def control() -> Iterator[socket.socket]:
    """The API process's end of a reader that runs here, in a process of its own."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT_S)

    def run() -> None:
        ours.close()
        jobs: Any = SimpleNamespace(prepared=lambda kind: ENDS[list(ENDS)[KINDS.index(kind)]][0])
        serve_copies(theirs, lambda purpose: partial(answer_all, jobs))

    copy = Copy(run)
    theirs.close()
    yield ours
    ours.close()
    assert copy.wait(WAIT_S) == 0


@pytest.mark.parametrize("name", ENDS)
def test_a_copy_that_ends_says_how(name: str, control: socket.socket) -> None:
    job, end = socket.socketpair()
    kind = list(ENDS).index(name)
    with job, end:
        socket.send_fds(control, [COPY_NUMBER.pack(7)], [end.fileno()])
        assert job.recv(1) == READY
        job.sendall(JOB.pack(kind, 0, 0.05))
        number, code, used_s = COPY_END.unpack(control.recv(COPY_END.size))
    assert (number, code) == (7, ENDS[name][1]) and used_s >= (0.05 if name == "takes too long" else 0.0)


def test_too_few_processes_or_files_for_a_copy_are_no_fault_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)

    def prepare() -> Callable[[socket.socket], None]:
        return lambda end: None

    before = psutil.Process().num_fds()
    job, end = socket.socketpair()
    with job, pytest.raises(OSError, match="Resource temporarily unavailable"):
        processes._start_served_copy([end.detach()], prepare)
    assert psutil.Process().num_fds() == before
    with pytest.raises(OSError, match="too many files"):
        processes._start_served_copy([], prepare)


def test_a_grammar_without_a_copy_gets_a_503_and_is_good_when_it_comes_again(server: RunningServer) -> None:
    assert guided(server, guided_regex="idle").status_code == 200
    child = reader_of(server).child
    assert child is not None
    reader = psutil.Process(child.pid)
    for copy in reader.children():
        copy.kill()
    server.wait_for(lambda: reader_of(server).queues["grammars"].copy is None)
    limited = reader.rlimit(psutil.RLIMIT_NOFILE)
    reader.rlimit(psutil.RLIMIT_NOFILE, (3, limited[1]))
    response = guided(server, guided_regex="no copy")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable"), response.text
    reader.rlimit(psutil.RLIMIT_NOFILE, limited)
    assert guided(server, guided_regex="no copy").status_code == 200


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_ends_waits_for_no_grammar(
    caplog: pytest.LogCaptureFixture, checkpoint: Path, is_busy: bool
) -> None:
    """Nor does one that is told to end now, while it drains."""
    server = RunningServer(new_engine(Tokenizer.load(checkpoint)), load_serving_config(checkpoint), 1000.0)
    assert guided(server, guided_regex="first").status_code == 200
    reader = reader_of(server)
    assert reader.child is not None
    suspend(reader)
    with ThreadPoolExecutor(2) as others:
        waits = others.submit(guided, server, guided_regex="a")
        server.wait_for(lambda: reader.is_running)
        if is_busy:
            server.engine.script = lambda request: Script([5], hang=True)
            others.submit(server.post, "/v1/completions", {"prompt": "hello"})
            server.engine.wait_for(lambda: server.engine.played == 2)
            server.call(server.server.stop)
        server.call(server.server.stop)
        response = waits.result(WAIT_S)
    server.stop()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable"), response.text
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_reader_that_makes_copies_has_no_threads(checkpoint: Path) -> None:
    """Not even those that numpy starts when it is imported, and that end with the first copy."""

    async def scenario() -> None:
        reader = Reader(engine_config(500), load_serving_config(checkpoint))
        await reader.do("grammars", "", "grammar", msgspec.msgpack.encode(Grammar("regex", "a")))
        await reader.do("bodies", "", "completions", b'{"prompt": [1]}')
        assert reader.child is not None
        assert psutil.Process(reader.child.pid).num_threads() == 1
        await reader.close()

    asyncio.run(scenario())
