"""A program of clients that send what no client should: raw bytes, or JSON of every shape.

It prints how many requests it sent, and how often each status was told.

python -m tests.soak.hostile URL bytes|requests SECONDS SEED
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.soak.hostile_fields import COMPANIONS, FIELDS, LIKELY, any_value, lasting, likely

CLIENTS = 64
PATIENCE_S, LASTING_S = 1.0, 10.0
"""How long a client reads an answer before it leaves: any, and one whose answer is made to last."""
LASTING = 0.02
"""The share of requests that are followed for long."""
RESET = struct.pack("ii", 1, 0)
"""Closing such a socket resets the connection."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/x", "/health", "/metrics")
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
NEST = 100_000
GOOD = {
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 8},
}


class Attack(NamedTuple):
    """What a client sends, and how long it reads the answer at most."""

    data: bytes
    patience_s: float = PATIENCE_S


def head(rng: random.Random, length: int) -> bytes:
    """The head of a request that is good, mostly."""
    path = rng.choice(list(GOOD)) if rng.random() < 0.7 else rng.choice(PATHS)
    kind = rng.choice(["application/json"] * 20 + ["text/plain", "application/json; charset=x", "a/b;;"])
    lines = [
        f"{rng.choice(['POST'] * 20 + ['GET', 'PUT', 'HEAD', 'OPTIONS', 'FOO', 'post'])} {path} "
        f"HTTP/{rng.choice(['1.1'] * 20 + ['1.0', '2.0', '0.9', '1'])}",
        "host: x",
        f"content-type: {kind}",
    ]
    lines += rng.sample(
        [
            "connection: close",
            "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk",
            "expect: 100-continue",
            "origin: http://evil.example",
            "authorization: Bearer " + "x" * rng.choice([1, 1000, 70_000]),
            "x-request-id: " + chr(rng.randrange(1, 256)) * rng.choice([1, 128, 129]),
            " folded: header",
            "a" * rng.choice([1, 100, 10_000]) + ": b",
            "\r\n".join(f"x-{i}: y" for i in range(rng.choice([1, 100, 5000]))),
            "transfer-encoding: " + rng.choice(["chunked", "gzip, chunked", "identity", "chunked, chunked"]),
            "content-length: " + rng.choice(["0", "-1", "1e3", "99999999999999999999", str(10 << 30), str(length + 1)]),
        ],
        rng.choice([0, 0, 0, 0, 0, 1, 1, 2, 3]),
    )
    if rng.random() < 0.9:
        lines.append(f"content-length: {length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes changed, left out, doubled or put in."""
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        at = rng.randrange(len(result) + 1)
        piece = rng.choice([b"", rng.randbytes(1), rng.randbytes(16), b"\r\n", b"\0", bytes(result[at : at + 32])])
        result[at : at + rng.choice([0, 1, 1, 16])] = piece
    return bytes(result)


def chunked(rng: random.Random, body: bytes) -> bytes:
    """`body` in chunks, of which some lie about their size."""
    out = b""
    while body:
        size = rng.randrange(1, 64)
        part, body = body[:size], body[size:]
        told = rng.choice([b"%x" % len(part)] * 12 + [b"fffffffffffffffff", b"-1", b"%x;%s" % (len(part), b"e" * 9000)])
        out += told + b"\r\n" + part + b"\r\n"
    return out + rng.choice([b"0\r\n\r\n", b"0\r\n" + b"t: u\r\n" * 300 + b"\r\n", b""])


def raw_bytes(rng: random.Random) -> Attack:
    """All bytes of one connection, with one request or several, or none at all."""
    if rng.random() < 0.1:
        return Attack(rng.randbytes(rng.choice([1, 100, 10_000, 200_000])))
    body = json.dumps(rng.choice(list(GOOD.values()))).encode()
    if rng.random() < 0.15:
        data = head(rng, 0).replace(b"content-length: 0", b"transfer-encoding: chunked") + chunked(rng, body)
    elif rng.random() < 0.05:
        data = head(rng, 60 << 20) + b" " * (8 << 20)
    else:
        data = head(rng, len(body)) + body
    data *= rng.choice([1, 1, 1, 2, 30])
    return Attack(mutated(rng, data) if rng.random() < 0.4 else data)


def json_body(rng: random.Random, good: dict[str, Any]) -> bytes:
    """`good` with a few fields of any value, or with one whose size or depth is the attack."""
    path_body = dict(good)
    kind = rng.random()
    if kind < 0.9:
        make, names = rng.choice([(likely, list(LIKELY)), (likely, list(LIKELY)), (any_value, FIELDS)])
        names = rng.sample(names, rng.choice([0, 1, 1, 2, 3, 5]))
        for name in names + [other for each in names for other in COMPANIONS.get(each, ())]:
            path_body[name] = make(name, rng)
        if rng.random() < 0.3:
            path_body["stream"] = True
    elif kind < 0.94:
        path_body[rng.choice(FIELDS)] = [
            rng.choice([0, "a", None, {"role": "user", "content": "a"}, [1]])
        ] * rng.choice([10_000, 200_000])
    elif kind < 0.97:
        path_body[rng.choice(FIELDS)] = rng.choice(["a", "\u20ac", "\n", " "]) * rng.choice([10**5, 10**6, 5 * 10**6])
    else:
        opening = rng.choice([b"[", b'{"a":'])
        return b'{"prompt":' + opening * NEST
    body = json.dumps(path_body).encode()
    return mutated(rng, body) if rng.random() < 0.08 else body


def json_request(rng: random.Random) -> Attack:
    made_for, lasts = rng.choice(list(GOOD)), rng.random() < LASTING
    body = json.dumps(GOOD[made_for] | lasting(rng)).encode() if lasts else json_body(rng, GOOD[made_for])
    path = rng.choice([made_for] * 30 + [*GOOD, "/reset_prefix_cache", "/tokenize", "/v1//completions/"])
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close"
    data = f"{lines}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    return Attack(data, LASTING_S if lasts else PATIENCE_S)


async def one_connection(address: tuple[str, int], rng: random.Random, attack: Attack, told: Counter[int]) -> bool:
    """Send an attack, at once or in pieces with pauses, read some of the answer and leave politely or not.

    Returns whether all was sent.
    """
    reader, writer = await asyncio.open_connection(*address)
    if rng.random() < 0.2:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sent = False
    try:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S * 8 + attack.patience_s):
                await _send(writer, rng, attack.data)
                sent = True
                if rng.random() < 0.1:
                    writer.write_eof()
                if rng.random() < 0.85:
                    await _read(reader, rng.choice([100, 10**7, 10**7]), attack.patience_s, told)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return sent


async def _send(writer: asyncio.StreamWriter, rng: random.Random, data: bytes) -> None:
    pieces = rng.choice([1, 1, 1, 1, 2, 5, 20])
    size = max(1, -(-len(data) // pieces))
    for i in range(0, len(data), size):
        writer.write(data[i : i + size])
        await writer.drain()
        if pieces > 1:
            await asyncio.sleep(rng.random() * 0.2)


async def _read(reader: asyncio.StreamReader, limit: int, patience_s: float, told: Counter[int]) -> None:
    tail = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while limit > 0 and (part := await reader.read(65536)):
                limit -= len(part)
                told.update(int(status) for status in STATUS.findall(tail + part))
                tail = part[-11:]


async def assault(
    url: str, make: Callable[[random.Random], Attack], seconds: float, seed: int
) -> tuple[int, Counter[int]]:
    """CLIENTS of them until the time is over; how many requests were sent, and how often each status was told."""
    address, told, num_sent = urlsplit(url), Counter[int](), 0
    assert address.hostname and address.port
    until_s = time.monotonic() + seconds

    async def client(rng: random.Random) -> None:
        nonlocal num_sent
        while time.monotonic() < until_s:
            with suppress(OSError):
                sent = await one_connection((address.hostname or "", address.port or 0), rng, make(rng), told)
                num_sent += sent  # not with the await, during which others count

    await asyncio.gather(*(client(random.Random(seed * 1000 + i)) for i in range(CLIENTS)))
    return num_sent, told


if __name__ == "__main__":
    _, url, kind, seconds, seed = sys.argv
    make = {"bytes": raw_bytes, "requests": json_request}[kind]
    num_sent, told = asyncio.run(assault(url, make, float(seconds), int(seed)))
    print(json.dumps({"sent": num_sent, "told": told}))
