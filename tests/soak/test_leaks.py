"""Thousands of short requests with random aborts leave nothing behind: blocks, requests, descriptors, memory."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest

from tests.e2e.questions import ask_all, user
from tests.e2e.server import Server
from tests.soak.clean import SLACK_DESCRIPTORS, check_clean, footprint, settle

pytestmark = pytest.mark.e2e

CONCURRENCY = 32
GROWTH_BYTES_PER_REQUEST = 100


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """A short completion, streamed or not, of which some are abandoned; returns how it ended."""
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 48))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 10), "ignore_eos": True}
    fate = rng.random()
    if fate < 0.4:
        (await client.post("/v1/completions", json=body)).raise_for_status()
        return "whole"
    body |= {"stream": True, "max_tokens": 200 if fate > 0.7 else body["max_tokens"]}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for _ in reply.aiter_lines():
            if fate > 0.7:
                return "aborted"
    return "streamed"


async def many(url: str, count: int, seed: int) -> dict[str, int]:
    """`count` requests, CONCURRENCY at once; how many ended in which way."""
    ends: dict[str, int] = {"whole": 0, "streamed": 0, "aborted": 0}
    rng, left = random.Random(seed), iter(range(count))
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def work() -> None:
            for _ in left:
                ends[await one_request(client, rng)] += 1

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return ends


def leave_after_every_byte(server: Server) -> None:
    """Send every beginning of two requests, of which one is streamed, and leave at once."""
    for stream in (False, True):
        body = json.dumps({"prompt": [7] * 40, "max_tokens": 2000, "ignore_eos": True, "stream": stream}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        data = head % len(body) + body
        for cut in range(len(data) + 1):
            with socket.create_connection(("127.0.0.1", server.ready["port"]), timeout=60) as client:
                client.sendall(data[:cut])


def meet_every_batch_size(server: Server) -> None:
    """Prompts of all lengths up to a step's: code is prepared, and memory kept, for each batch size once."""
    for length in range(8, 513, 8):
        reply = server.http.post("/v1/completions", json={"prompt": [length % 256] * length, "max_tokens": 1})
        reply.raise_for_status()


def test_hundreds_of_requests_leave_nothing() -> None:
    with Server("--max-num-seqs", "16", "--kv-memory", "16MiB", "--log-level", "warning") as server:
        asyncio.run(many(server.url, 100, seed=1))
        ask_all(server, [[user("Hi")]])  # once it is answered, the reader of chats has started
        before = footprint(server)
        ends = asyncio.run(many(server.url, 500, seed=2))
        assert min(ends.values()) > 50
        leave_after_every_byte(server)
        check_clean(server)
        for (role, _, fds), (_, _, fds_after) in zip(before, footprint(server), strict=True):
            assert fds_after <= fds + SLACK_DESCRIPTORS, f"{role} leaks descriptors"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_leave_nothing() -> None:
    with Server("--max-num-seqs", "16", "--kv-memory", "16MiB", "--log-level", "warning") as server:
        meet_every_batch_size(server)
        asyncio.run(many(server.url, 2000, seed=1))
        ask_all(server, [[user("Hi")]])
        settle(server)
        before = footprint(server)
        ends = asyncio.run(many(server.url, 8000, seed=2))
        assert min(ends.values()) > 1000
        check_clean(server)
        for (role, rss, fds), (_, rss_after, fds_after) in zip(before, footprint(server), strict=True):
            growth = (rss_after - rss) / 8000
            print(f"{role}: {growth:.1f} bytes per request, {fds_after} descriptors")
            assert growth < GROWTH_BYTES_PER_REQUEST, f"{role} grows by {growth:.0f} bytes per request"
            assert fds_after <= fds + SLACK_DESCRIPTORS, f"{role} leaks descriptors"
