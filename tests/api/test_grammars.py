"""Grammars that take long to compile, from the client's side: nobody waits but those who sent one, and they in turn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pypto_serving.api.reading import grammars
from pypto_serving.api.reading.grammars import Grammars
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar
from tests.api.bad_bodies import HELLO
from tests.api.checkpoint import CHATML, write_checkpoint
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S

SLOW = {"type": "integer", "multipleOf": 9_999_991}
NUM_SLOW = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose chats go to a reader."""
    folder = write_checkpoint(tmp_path_factory.mktemp("templates"), template=CHATML)
    running = RunningServer(new_engine(Tokenizer.load(folder)), load_serving_config(folder))
    yield running
    running.stop()


def guided(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})


def reader_of(server: RunningServer) -> Grammars:
    found: Grammars = server.app.state.reading._grammars
    return found


def test_chats_are_answered_while_grammars_compile(server: RunningServer) -> None:
    """However long a grammar takes: the reader stands still until all chats are answered."""
    reader = reader_of(server)
    assert guided(server, guided_regex="first").status_code == 200
    child = reader.process._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(NUM_SLOW) as others:
        slow = [others.submit(guided, server, guided_regex=f"a{i}") for i in range(NUM_SLOW)]
        server.wait_for(lambda: reader.turns.num_waiting == NUM_SLOW - 1)
        for _ in range(3):
            for path, body in ((CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "a"})):
                assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
        assert guided(server, guided_regex="first").status_code == 200, "it is known to compile"
        assert not any(each.done() for each in slow)
        os.kill(child.pid, signal.SIGCONT)
        assert [each.result(WAIT_S).status_code for each in slow] == [200] * NUM_SLOW


FIELDS = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SLOW}}},
    "structured_outputs.json": {"structured_outputs": {"json": SLOW}},
    "guided_json": {"guided_json": SLOW},
}


def test_a_grammar_that_takes_too_long_is_named_and_remembered(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "COMPILE_S", 0.25)
    for field, fields in FIELDS.items():
        response = guided(server, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "reading_timeout")
        assert error["message"].startswith(f"{field}: it took more than 0.25 s of CPU time to compile")
        assert reader_of(server).process._child is None, "a repeat starts no process"
    assert guided(server, guided_regex="b").status_code == 200


def integer(number: int) -> Grammar:
    return Grammar("json_schema", f'{{"type": "integer", "multipleOf": {number}}}')


def test_turns_go_to_hosts_and_connections_that_had_the_least_time() -> None:
    async def scenario() -> list[str]:
        reader = Grammars(99)
        order = list[str]()

        async def check(name: str, number: int, client: tuple[str, int]) -> None:
            await reader.check(integer(number), "json", client)
            order.append(name)

        busy = [check(f"busy {i}", 1001 + 2 * i, ("10.0.0.1", 1)) for i in range(3)]
        others = [check("its neighbour", 2001, ("10.0.0.1", 2)), check("other host", 3001, ("10.0.0.2", 1))]
        await asyncio.gather(*busy, *others)
        await reader.close()
        return order

    assert asyncio.run(scenario()) == ["busy 0", "other host", "its neighbour", "busy 1", "busy 2"]


def test_few_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "REMEMBERED", 4)

    async def scenario() -> None:
        reader = Grammars(99)
        for i in range(8):
            assert await reader.check(Grammar("regex", f"a{i}"), "x", None) == Grammar("regex", f"a{i}")
            with pytest.raises(RequestError, match=r"x: .*unclosed"):
                await reader.check(Grammar("regex", f"(a{i}"), "x", None)
        assert (len(reader._known._compiling), len(reader._known._refused)) == (4, 4)
        assert (await reader.check(Grammar("gbnf", 'root ::= "a"'), "x", None)).syntax == "lark"
        await reader.close()

    asyncio.run(scenario())
