"""What a real server tells about its cache, to a plain reader and to Dynamo's indexer."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.e2e.server import Server
from tests.engine.event_reader import EventReader

pytestmark = pytest.mark.e2e

SMALL = ("--max-model-len", "256", "--max-num-seqs", "2", "--kv-events", "tcp://127.0.0.1:0")
"""16 blocks of 32 tokens on the device: two long prompts displace what was there."""
BLOCK_SIZE = 32
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(*SMALL) as started:
        yield started


def prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(20, 200), k=length)


def complete(server: Server, token_ids: list[int], **fields: object) -> None:
    body = {"model": "bundled", "prompt": token_ids, "max_tokens": 1, **fields}
    server.http.post("/v1/completions", json=body).raise_for_status()


def prefixes(reader: EventReader, token_ids: list[int]) -> int:
    """Tokens of the longest prefix that the index holds on the device."""
    held, parent, count = reader.index["GPU", 0], None, 0
    while count + BLOCK_SIZE <= len(token_ids):
        wanted = (parent, token_ids[count : count + BLOCK_SIZE], BLOCK_SIZE)
        parent = next((block for block, content in held.items() if content == wanted), None)
        if parent is None:
            break
        count += BLOCK_SIZE
    return count


def core(server: Server) -> psutil.Process:
    return next(p for p in server.family() if "pypto_serving.engine" in p.cmdline())


def test_a_reader_follows_the_cache_through_evictions_and_deaths(server: Server) -> None:
    first, second = prompt(1), prompt(2)
    complete(server, first)
    with EventReader(server.ready["kv_events"], server.ready["kv_events_replay"]) as reader:
        while not reader.replay(0) or not prefixes(reader, first):
            time.sleep(0.01)
        assert prefixes(reader, first) == 192
        while not reader.receive(timeout_ms=100):
            complete(server, prompt(3, 40))
        complete(server, second)
        complete(server, prompt(4))
        reader.receive_until(lambda r: prefixes(r, first) < 192)

        server.worker().kill()
        reader.receive_until(lambda r: r.types[-1] == "AllBlocksCleared")
        complete(server, second)
        reader.receive_until(lambda r: prefixes(r, second) == 192)
        last = reader.numbers[-1]

        core(server).kill()
        reader.receive_until(lambda r: r.types[-1] == "AllBlocksCleared" and r.numbers[-1] > last)
        assert not any(reader.index.values()), "another core speaks at the same endpoints, with higher numbers"


# Dynamo.


def dynamo_python() -> str:
    """An interpreter that has Dynamo's indexer: $DYNAMO_PYTHON, or this one."""
    named = os.environ.get("DYNAMO_PYTHON")
    if named is None and importlib.util.find_spec("dynamo") is None:
        pytest.skip("no Dynamo: install ai-dynamo-runtime anywhere, and name its Python by DYNAMO_PYTHON")
    return named or sys.executable


class Indexer:
    """`python -m dynamo.indexer`, asked over HTTP."""

    def __init__(self) -> None:
        python = dynamo_python()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [python, "-m", "dynamo.indexer", "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.wait(self._answers)

    def _answers(self) -> bool:
        try:
            return self.http.get("/workers").status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None, "the indexer ended"
            return False

    def register(self, server: Server) -> None:
        body = {
            "instance_id": 7,
            "model_name": "bundled",
            "block_size": BLOCK_SIZE,
            "endpoint": server.ready["kv_events"],
            "replay_endpoint": server.ready["kv_events_replay"],
        }
        self.http.post("/register", json=body).raise_for_status()

    def score(self, token_ids: list[int]) -> int:
        """Tokens of the prompt that the indexer believes to be on the server's device."""
        answer = self.http.post("/query", json={"model_name": "bundled", "token_ids": token_ids}).json()
        return int(answer["scores"].get("7", {}).get("0", 0))

    def host_score(self, token_ids: list[int]) -> int:
        """Tokens that it believes to be on the server's device or in its host tier."""
        answer = self.http.post("/query", json={"model_name": "bundled", "token_ids": token_ids}).json()
        return int(answer["instances"].get("7", {}).get("cpu", 0))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "the indexer did not come to know"
            time.sleep(0.02)

    def close(self) -> None:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    started = Indexer()
    yield started
    started.close()


def test_dynamo_knows_what_the_server_caches(indexer: Indexer, server: Server) -> None:
    first, second = prompt(1), prompt(2)
    complete(server, first)
    indexer.register(server)
    while indexer.score(first) == 0:
        complete(server, prompt(random.randrange(100, 10**9), 40))
        assert server.metric("vllm:generation_tokens_total") < 10_000, "events do not reach the indexer"
        complete(server, first)
    assert indexer.score(first) == 192, "what was stored before it listened comes from the replay"
    complete(server, second)
    indexer.wait(lambda: indexer.score(second) == 192)
    complete(server, prompt(3))
    indexer.wait(lambda: indexer.score(first) < 192)

    server.worker().kill()
    indexer.wait(lambda: indexer.score(first) == indexer.score(second) == 0)
    complete(server, second)
    indexer.wait(lambda: indexer.score(second) == 192)

    core(server).kill()
    indexer.wait(lambda: indexer.score(second) == 0)


def test_dynamo_knows_what_is_in_the_host_tier(indexer: Indexer) -> None:
    first = prompt(1)
    with Server(*SMALL, "--kv-host-memory", "16MiB") as server:
        complete(server, first)
        indexer.register(server)
        while indexer.host_score(first) != 192 or indexer.score(first) == 192:
            complete(server, prompt(random.randrange(100, 10**9)))
            assert server.metric("vllm:generation_tokens_total") < 10_000, "events do not reach the indexer"
        server.worker().kill()
        complete(server, first)
        indexer.wait(lambda: indexer.score(first) == 192)
