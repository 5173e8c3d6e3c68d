"""Load, cut and scale request traces in Mooncake's format. Make prompts that share exactly the trace's prefixes.

A line is a JSON object: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids` with
one id per block of 512 prompt tokens, of which the last may be partial. Equal ids mean equal tokens after equal
prefixes (Qin et al., Mooncake, FAST 2025).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pypto_serving.bench.options import read_rows, require_int, require_positive
from pypto_serving.errors import ConfigError
from pypto_serving.types.arrays import Int32Array
from pypto_serving.util import ceil_div

TRACE_BLOCK = 512
"""Prompt tokens per hash id in a file."""
EXCERPT = Path(__file__).parents[1] / "assets" / "traces" / "mooncake_conversation_200.jsonl"
"""The first 200 requests of Mooncake's conversation trace."""
_MAX_BLOCK_BITS = 20


class _TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: arrival in seconds after the first request; lengths in tokens, each at least 1."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.input_len + self.output_len


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order of arrival, each with one hash id per `block_size` prompt tokens."""

    requests: tuple[TraceRequest, ...]
    block_size: int = TRACE_BLOCK

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(r.num_tokens for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(r.input_len for r in self.requests)

    def head(self, count: int | None, duration_s: float | None) -> Trace:
        """Return the first `count` requests that arrive within the first `duration_s` seconds."""
        if count is not None:
            require_int("--requests", count, 1)
        if duration_s is not None:
            require_positive("--duration", duration_s)
        limit_s = float("inf") if duration_s is None else duration_s
        return replace(self, requests=tuple(r for r in self.requests[:count] if r.arrival_s < limit_s))

    def scaled(self, scale: Fraction) -> Trace:
        """Multiply all lengths by `scale`, rounded up, and also the block size; hash ids stay the same.

        Raises ConfigError unless the scaled block has a whole number of tokens.
        """
        size = self.block_size * scale
        if size.denominator != 1 or not 1 <= size < 1 << _MAX_BLOCK_BITS:
            raise ConfigError(f"--scale {scale} makes blocks of {float(size):g} tokens; choose a multiple of 1/512")
        requests = tuple(
            TraceRequest(r.arrival_s, _times(r.input_len, scale), _times(r.output_len, scale), r.hash_ids)
            for r in self.requests
        )
        return Trace(requests=requests, block_size=size.numerator)

    def faster(self, speedup: float) -> Trace:
        """Divide the times between arrivals by `speedup`."""
        require_positive("--speedup", speedup)
        return replace(
            self, requests=tuple(msgspec.structs.replace(r, arrival_s=r.arrival_s / speedup) for r in self.requests)
        )

    def token_ids(self, request: TraceRequest, seed: int, vocab_size: int) -> Int32Array:
        """Make the prompt, int32 [input_len]: token i of a block is hash(seed, hash id, i) mod `vocab_size`."""
        blocks = np.array(request.hash_ids, dtype=np.uint64)[:, None] << np.uint64(_MAX_BLOCK_BITS)
        counters: NDArray[np.uint64] = blocks | np.arange(self.block_size, dtype=np.uint64)
        counters += _mix(np.array([seed], dtype=np.uint64))
        ids = (_mix(counters) % np.uint64(vocab_size)).astype(np.int32)
        return ids.reshape(-1)[: request.input_len]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash counters by SplitMix64's step and finalizer, a bijection (Steele, Lea, Flood 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _times(length: int, scale: Fraction) -> int:
    return ceil_div(length * scale.numerator, scale.denominator)


def parse_scale(text: str) -> Fraction:
    """Parse `1/16` or `0.0625` to an exact number above 0. Raises ConfigError."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--scale must be a number or a fraction such as 1/16, got {text!r}") from None
    if scale <= 0:
        raise ConfigError(f"--scale must be above 0, got {text}")
    return scale


def load_trace(path: Path) -> Trace:
    """Load all requests of a file in Mooncake's format. Raises ConfigError that names the first bad line."""
    requests: list[TraceRequest] = []
    start_ms = last_ms = 0.0
    for where, parsed in read_rows("trace", path, _TraceLine):
        _check(where, parsed)
        if not requests:
            start_ms = last_ms = parsed.timestamp
        if parsed.timestamp < last_ms:
            raise ConfigError(f"{where}: timestamp {parsed.timestamp:g} is before that of the last")
        last_ms = parsed.timestamp
        arrival_s = (last_ms - start_ms) / 1e3
        output_len = max(1, parsed.output_length)
        requests.append(TraceRequest(arrival_s, parsed.input_length, output_len, tuple(parsed.hash_ids)))
    if not requests:
        raise ConfigError(f"trace {path} is empty; it needs at least one request")
    return Trace(requests=tuple(requests))


def _check(where: str, parsed: _TraceLine) -> None:
    """Raise ConfigError unless lengths and hash ids fit each other."""
    require_int(f"{where}: input_length", parsed.input_length, 1)
    require_int(f"{where}: output_length", parsed.output_length, 0)
    wanted = ceil_div(parsed.input_length, TRACE_BLOCK)
    if len(parsed.hash_ids) != wanted:
        raise ConfigError(
            f"{where}: {len(parsed.hash_ids)} hash_ids for an input_length of {parsed.input_length}; "
            f"with one per {TRACE_BLOCK} tokens there must be {wanted}"
        )
    if not 0 <= min(parsed.hash_ids) <= max(parsed.hash_ids) < 1 << 63 - _MAX_BLOCK_BITS:
        raise ConfigError(f"{where}: hash_ids must lie in [0, 2^{63 - _MAX_BLOCK_BITS})")


def lru_hits(trace: Trace, capacity: float, block_size: int = 1) -> list[int]:
    """Return, per request, the prompt tokens that hit in an LRU cache of `capacity` tokens, which may be infinite.

    Requests run one after the other; outputs and blocks in use take no space. The result bounds the hits of an engine
    with blocks of `block_size` tokens: only whole blocks hit, and never the last token of a prompt.
    """
    limits = [request.input_len - 1 for request in trace.requests]
    runs = [blocks * trace.block_size for blocks in _lru_runs(trace, capacity)]
    return [min(run, limit) // block_size * block_size for run, limit in zip(runs, limits, strict=True)]


def _lru_runs(trace: Trace, capacity: float) -> Iterator[int]:
    """Yield, per request, how many of its first blocks are cached when it arrives."""
    cache: OrderedDict[int, None] = OrderedDict()
    for request in trace.requests:
        run = next((i for i, h in enumerate(request.hash_ids) if h not in cache), len(request.hash_ids))
        for hash_id in request.hash_ids:
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        while len(cache) * trace.block_size > capacity:
            cache.popitem(last=False)
        yield run
