"""Grammars that take long to compile, from the client's side: nobody waits but those who sent one, and they in turn."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from pypto_serving.api.reading import grammars, known, lane, process
from pypto_serving.api.reading.bodies import BodyProcess
from pypto_serving.api.reading.grammars import COMPILE_S, LANES_S, Grammars
from pypto_serving.api.reading.lane import Client, Lane
from pypto_serving.api.reading.loop import apart
from pypto_serving.api.reading.process import ReaderProcess
from pypto_serving.api.reading.wire import Busy, Compiles, Ended
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar, Guide
from tests.api.bad_bodies import HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S, Script

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


def lanes_of(server: RunningServer) -> list[Lane]:
    found: list[Lane] = server.app.state.reading._grammars.lanes
    return found


@contextmanager
def stopped(process: ReaderProcess[Any]) -> Iterator[None]:
    """A reader that stands still."""
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGSTOP)
    yield
    os.kill(process._child.pid, signal.SIGCONT)


def test_chats_are_answered_while_grammars_compile(server: RunningServer) -> None:
    """However long a grammar takes: the reader stands still until all chats are answered."""
    quick = lanes_of(server)[0]
    assert guided(server, guided_regex="first").status_code == 200
    with ThreadPoolExecutor(NUM_SLOW) as others:
        with stopped(quick.process):
            slow = [others.submit(guided, server, guided_regex=f"a{i}") for i in range(NUM_SLOW)]
            server.wait_for(lambda: quick.turns.num_waiting == NUM_SLOW - 1)
            for _ in range(3):
                for path, body in ((CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "a"})):
                    assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
            assert guided(server, guided_regex="first").status_code == 200, "it is known to compile"
            assert not any(each.done() for each in slow)
        assert [each.result(WAIT_S).status_code for each in slow] == [200] * NUM_SLOW


def test_grammars_that_take_long_hold_up_none_that_do_not(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those come from the same host, and the last reader stands still until all others are answered."""
    last = lanes_of(server)[-1]
    monkeypatch.setattr(last, "allowed_s", 0.25)
    assert guided(server, guided_json=slow_schema(0)).status_code == 400
    with ThreadPoolExecutor(NUM_SLOW) as others:
        with stopped(last.process):
            slow = [others.submit(guided, server, guided_json=slow_schema(1 + i)) for i in range(3)]
            server.wait_for(lambda: last.turns.taken)
            for i in range(3):
                assert guided(server, guided_regex=f"quick{i}").status_code == 200
            server.wait_for(lambda: last.turns.num_waiting == 2)
            assert guided(server, guided_regex="quick").status_code == 200
            for process in (lane.process for lane in lanes_of(server)[:-1]):
                assert process._child is not None and process._child.process.poll() is None, "only copies end"
            assert not any(each.done() for each in slow)
        assert {each.result(WAIT_S).status_code for each in slow} == {400}


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that are compiled from now on, once for each lane."""
    found: list[Grammar] = []
    compile = Lane.compile

    async def counting(self: Lane, grammar: Grammar, client: Client) -> Compiles:
        found.append(grammar)
        return await compile(self, grammar, client)

    monkeypatch.setattr(Lane, "compile", counting)
    return found


FIELDS = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW}}},
    "structured_outputs.json": {"structured_outputs": {"json": SLOW}},
    "guided_json": {"guided_json": SLOW},
}


def test_a_grammar_that_takes_too_long_is_named_and_remembered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes_of(server)[-1], "allowed_s", 0.25)
    compiled = asked(monkeypatch)
    for field, fields in FIELDS.items():
        response = guided(server, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "reading_timeout")
        assert error["message"].startswith(f"{field}: it took more than 0.25 s of CPU time to compile")
        assert len(compiled) == len(LANES_S), "a repeat is not compiled"
    assert guided(server, guided_regex="b").status_code == 200


def test_a_busy_machine_is_not_the_fault_of_a_grammar_or_body(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that stand still get no CPU time. The same requests are good when they come again."""
    quick: BodyProcess = server.app.state.reading._quick
    requests = [
        (lanes_of(server)[0].process, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "guided_regex": "busy"}),
        (quick.process, CHAT, {"messages": [HELLO], "max_tokens": 1}),
    ]
    assert guided(server, guided_regex="idle").status_code == 200
    for reader, path, body in requests:
        assert reader._child is not None
        at_work = psutil.Process(reader._child.pid)
        for each in (at_work, *at_work.children()):
            each.suspend()
        with monkeypatch.context() as impatient:
            impatient.setattr(process, "PATIENCE", 0)
            impatient.setattr(process, "PATIENCE_S", 0.05)
            response = server.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (503, "unavailable", None), response.text
        assert int(response.headers["retry-after"]) > 0 and "too busy" in error["message"]
        assert server.post(path, body).status_code == 200


def integer(number: int) -> Guide:
    return Guide(Grammar("json_schema", f'{{"type": "integer", "multipleOf": {number}}}'))


def test_turns_go_to_hosts_and_connections_that_had_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "LANES_S", (COMPILE_S,))

    async def scenario() -> list[str]:
        reader = Grammars(99)
        order = list[str]()

        async def check(name: str, number: int, client: tuple[str, int]) -> None:
            await reader.check(integer(number), client)
            order.append(name)

        busy = [check(f"busy {i}", 1001 + 2 * i, ("10.0.0.1", 1)) for i in range(3)]
        others = [check("its neighbour", 2001, ("10.0.0.1", 2)), check("other host", 3001, ("10.0.0.2", 1))]
        await asyncio.gather(*busy, *others)
        await reader.close()
        return order

    assert asyncio.run(scenario()) == ["busy 0", "other host", "its neighbour", "busy 1", "busy 2"]


def test_few_hosts_and_connections_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many clients wait at once."""
    monkeypatch.setattr(grammars, "LANES_S", (COMPILE_S,))
    monkeypatch.setattr(lane, "MAX_ACCOUNTS", 4)

    async def scenario() -> int:
        reader, most = Grammars(99), 0

        async def check(number: int) -> None:
            nonlocal most
            await reader.check(Guide(Grammar("regex", f"a{number}")), (f"10.0.0.{number}", 1))
            most = max(most, len(reader.lanes[0]._spent))

        await asyncio.gather(*map(check, range(12)))
        await reader.close()
        return most

    assert 4 < asyncio.run(scenario()) <= 6


def test_few_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "REMEMBERED", 4)
    monkeypatch.setattr(known, "KEPT_CHARS", 100)
    compiled = asked(monkeypatch)
    gbnf = [Guide(Grammar("gbnf", f'root ::= "{"a" * 30}{i}"')) for i in range(4)]

    async def scenario() -> None:
        reader = Grammars(99)
        for i in range(8):
            good, bad = (Guide(Grammar("regex", f"{text}{i}"), field="x") for text in ("a", "(a"))
            assert (await reader.check(good, None)).grammar == good.grammar
            with pytest.raises(RequestError, match=r"x: .*unclosed"):
                await reader.check(bad, None)
        assert (len(reader._known._compiling), len(reader._known._refused)) == (4, 4)
        for guide in gbnf:
            lark = await reader.check(guide, None)
            compiled.clear()
            assert lark.grammar is not None and lark.grammar.syntax == "lark"
            assert await reader.check(guide, None) == lark and not compiled, "what it was translated to is known"
        assert reader._known._num_chars <= 100
        await reader.check(gbnf[0], None)
        assert compiled == [gbnf[0].grammar], "only so many characters are kept"
        await reader.close()

    asyncio.run(scenario())


ENDS = {
    "takes too long": (lambda kind, raw: next(_ for _ in itertools.count() if _ < 0), -signal.SIGPROF),
    "is killed": (lambda kind, raw: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "exits": (lambda kind, raw: os._exit(3), 3),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_copy_that_ends_says_how(name: str) -> None:
    answer, code = ENDS[name]
    assert msgspec.msgpack.decode(apart(answer, 0, b"", 0.05), type=Ended) == Ended(code)


@pytest.mark.parametrize("name", ["pipe", "fork"])
def test_too_few_processes_or_files_for_a_copy_are_no_fault_of_the_grammar(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, name, fail)
    before = psutil.Process().num_fds()
    said = msgspec.msgpack.decode(apart(ENDS["exits"][0], 0, b"", 0.05), type=Busy)
    assert "Resource temporarily unavailable" in said.reason
    assert psutil.Process().num_fds() == before


def test_a_grammar_without_a_copy_gets_a_503_and_is_good_when_it_comes_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guided(server, guided_regex="idle").status_code == 200
    quick = lanes_of(server)[0].process
    assert quick._child is not None
    reader = psutil.Process(quick._child.pid)
    limits = reader.rlimit(psutil.RLIMIT_NOFILE)
    reader.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    response = guided(server, guided_regex="no copy")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable"), response.text
    reader.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert guided(server, guided_regex="no copy").status_code == 200


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_ends_waits_for_no_grammar(
    caplog: pytest.LogCaptureFixture, checkpoint: Path, is_busy: bool
) -> None:
    """Nor does one that is told to end now, while it drains."""
    server = RunningServer(new_engine(Tokenizer.load(checkpoint)), load_serving_config(checkpoint), 1000.0)
    assert guided(server, guided_regex="first").status_code == 200
    quick = lanes_of(server)[0]
    assert quick.process._child is not None
    os.kill(quick.process._child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as others:
        waits = others.submit(guided, server, guided_regex="a")
        server.wait_for(lambda: quick.turns.taken)
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


def test_a_reader_that_makes_copies_has_no_threads() -> None:
    """Not even those that numpy starts when it is imported, and that end with the first copy."""

    async def scenario() -> None:
        reader = Lane(COMPILE_S, 99).process
        await reader.ensure()
        assert reader._child is not None
        assert psutil.Process(reader._child.pid).num_threads() == 1
        await reader.close()

    asyncio.run(scenario())
