"""What `cuda_card.py` does on the card itself: limits, the kernels of `--backend cuda`, and random weights."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from random_weights import HIDDEN_ROW_SCALE
from random_weights import Tensor as StoredTensor
from rounds import table

from pypto_serving.kernels.cuda.launch import Launch, recording
from pypto_serving.kernels.cuda.tiles import Tile

CARD = torch.cuda.is_available()
if not CARD:
    os.environ["TRITON_INTERPRET"] = "1"
    import_module("tests.kernels.cuda.interpreter")
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "decodes": {
        "as it is": {},
        "pointers": {"attention.DECODES": {"tma": False}},
        "5 stages": {"attention.DECODES": {"num_stages": 5}},
        "split 256": {"attention.SPLIT": 256},
    },
    "chunks": {
        "as it is": {},
        "3 stages": {"attention.CHUNKS": {"num_stages": 3}},
        "128 rows": {"attention.CHUNKS": {"rows": 128, "num_warps": 8}},
    },
    "products": {
        "as it is": {},
        "64x128": {"tiles._GATED": ((1 << 20, 0, 0, Tile(64, 128, 64, 4, 5)),)},
    },
}
"""Settings to try, by kind of kernel: new values of constants here and in kernels/cuda, or of fields of a constant."""
DECODES = (
    (16, 1, 1024),
    (16, 256, 1024),
    (32, 1, 1024),
    (32, 1, 16384),
    (32, 8, 4096),
    (32, 64, 1024),
    (32, 256, 1024),
)
CHUNKS = ((16, 512, 512), (32, 512, 512), (32, 2048, 2048), (32, 2048, 8192))
"""Heads, rows (or tokens of a chunk), context."""
ROWS = (1, 64, 96, 128, 192, 256, 512, 2048)
PRODUCTS = {
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate-up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate-up": (24576, 4096),
    "8B down": (4096, 12288),
    "8B head": (151936, 4096),
}
if not CARD:
    DECODES, CHUNKS, ROWS, PRODUCTS = ((4, 2, 200),), ((4, 70, 200),), (1, 70), {"tiny": (128, 256)}
KV_HEADS, HEAD_DIM, BLOCK = 8 if CARD else 2, 128, 64
ROTATED_BYTES, COMPILERS = 3 * 10**8, 10 if CARD else 1
"""Data of the calls that are timed together, more than a cache holds. Processes that compile."""

Calls = Sequence[Callable[[], object]]


def seconds(calls: Calls, budget_s: float = 0.01) -> float:
    """Return the time of a call: of a graph of all, the median of replays. Without a card, make the first call once."""
    if not CARD:
        start_s = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start_s
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), list[float]()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:]) / len(calls)


def measure_limits() -> dict[str, Any]:
    """Measure the limits that other figures are compared with."""
    size, side = (1 << 30, 8192) if CARD else (1 << 20, 64)
    memory, one = torch.empty(size, dtype=torch.int32).random_(), torch.ones(1)
    a, b, c = (torch.randn(side, side, dtype=torch.bfloat16) for _ in range(3))
    host, place = torch.empty(size // 4, dtype=torch.int32, device="cpu", pin_memory=CARD), memory[: size // 4]
    return {
        "card": torch.cuda.get_device_name(0) if CARD else "none",
        "read_bytes_per_s": 4 * size / seconds([lambda: torch.amax(memory)], 0.05),
        "product_flops": 2 * side**3 / seconds([lambda: torch.mm(a, b, out=c)], 0.1),
        "node_s": seconds([lambda: one.add_(1)] * 500),
        "to_card_bytes_per_s": size / seconds([lambda: place.copy_(host, non_blocking=True)]),
        "from_card_bytes_per_s": size / seconds([lambda: host.copy_(place, non_blocking=True)]),
    }


def normal(_: str, shape: tuple[int, ...], spread: float, visible: NDArray[np.bool_] | None = None) -> StoredTensor:
    """Do what `random_weights.normal` does for bf16, on the card."""

    def draw(rng: np.random.Generator, first: int, last: int) -> NDArray[np.int16]:
        torch.manual_seed(int(rng.integers(2**62)))
        rows = torch.randn(last - first, *shape[1:]) * spread
        if visible is not None:
            rows[torch.as_tensor(~visible[first:last])] *= HIDDEN_ROW_SCALE
        return rows.bfloat16().view(torch.int16).cpu().numpy()

    return StoredTensor("BF16", shape, draw)


class Case(NamedTuple):
    """Part of a table. `make` prepares calls on rotating data; a call does `work`, in bytes or operations.

    Candidates are the columns of the line `name`, or lines of their own with the column `column`.
    """

    kind: str
    name: tuple[Any, ...]
    work: float
    make: Callable[[], Calls]
    candidates: Mapping[str, Mapping[str, Any]]
    column: int = 0


def copies(num_bytes: float) -> int:
    """Return how often data of a call are made, so that no cache holds them when their turn comes again."""
    return int(min(64, max(1, ROTATED_BYTES // num_bytes)))


def kv_bytes(rows: int, context: int) -> int:
    """Return the bytes of keys and values that decodes read in a layer."""
    return rows * context * 2 * KV_HEADS * HEAD_DIM * 2


def attention_inputs(heads: int, counts: Sequence[int], context: int, queries: int) -> tuple[Any, ...]:
    """Return queries, room for outputs, inputs with tiles of so many queries, and pages of several layers."""
    from pypto_serving.kernels.cuda import attention, step
    from pypto_serving.kernels.cuda.step import KVPages

    rows, tokens, per_row = len(counts), sum(counts), context // BLOCK + 1
    layers, blocks = copies(kv_bytes(rows, context)), 1 + rows * per_row
    starts, lengths = np.cumsum([0, *counts], dtype=np.int32), np.full(rows, context, np.int32)
    tiles = step.tiles_of_chunks(starts, lengths, queries, step.max_tiles(tokens, rows, queries))
    unused = torch.zeros(tokens, dtype=torch.int32)
    inputs = step.DispatchTensors(
        token_ids=unused,
        positions=unused,
        slots=unused,
        query_start=unused.new_tensor(starts),
        context_lens=unused.new_tensor(lengths),
        block_tables=1 + torch.randperm(rows * per_row).int().view(rows, per_row),
        tiles=unused.new_tensor(tiles),
        num_splits=-(-context // attention.SPLIT),
    )
    q = torch.randn(tokens, heads, HEAD_DIM, dtype=torch.bfloat16)
    data = torch.randn(blocks * layers * 2 * KV_HEADS * BLOCK * HEAD_DIM, dtype=torch.bfloat16)
    return q, torch.empty_like(q), inputs, KVPages(data, blocks, layers, KV_HEADS, HEAD_DIM, BLOCK)


def decode(heads: int, rows: int, context: int) -> Calls:
    """Return attention of decodes, layer after layer."""
    from pypto_serving.kernels.cuda import attention

    q, out, inputs, pages = attention_inputs(heads, [1] * rows, context, 1)
    parts = torch.empty(attention.num_partial(rows, heads, HEAD_DIM, inputs.num_splits))
    return [lambda i=i: attention.attend_decodes(q, inputs, i, pages, parts, out) for i in range(pages.num_layers)]


def chunk(heads: int, tokens: int, context: int) -> Calls:
    """Return attention of a chunk, the last tokens of a context, layer after layer."""
    from pypto_serving.kernels.cuda import attention

    queries = attention.CHUNKS.queries(heads, KV_HEADS)
    q, out, inputs, pages = attention_inputs(heads, [tokens], context, queries)
    return [lambda i=i: attention.attend_chunks(q, inputs, i, pages, out) for i in range(pages.num_layers)]


@lru_cache(maxsize=1)
def operands(n: int, k: int, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return rows, and matrices that rotate."""
    weights = [torch.randn(n, k, dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
    return torch.randn(rows, k, dtype=torch.bfloat16), weights


def product(n: int, k: int, rows: int, by: str) -> Calls:
    """Return products of rows with matrix after matrix, `by` ours, ours with a gate, or torch."""
    from pypto_serving.kernels.cuda.products import Bf16Matrix, GatedMatrix

    x, weights = operands(n, k, rows)
    if by == "torch":
        out = torch.empty(rows, n, dtype=torch.bfloat16)
        return [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]
    if by == "gated":
        out = torch.empty(rows, n // 2, dtype=torch.bfloat16)
        return [lambda w=w: w.multiply(x, out) for w in map(GatedMatrix, weights)]
    matrices = list(map(Bf16Matrix, weights))
    sums = torch.empty(matrices[0].num_sums(rows))
    return [lambda w=w: w.multiply(x, sums) for w in matrices]


def cases() -> list[Case]:
    """Return all that is measured."""
    tried, found = CANDIDATES, list[Case]()
    for each in DECODES:
        found.append(Case("decodes", each, kv_bytes(*each[1:]), partial(decode, *each), tried["decodes"]))
    for heads, tokens, context in CHUNKS:
        flops = 4 * heads * HEAD_DIM * tokens * (context - (tokens - 1) / 2)
        make = partial(chunk, heads, tokens, context)
        found.append(Case("chunks", (heads, tokens, context), flops, make, tried["chunks"]))
    for (name, (n, k)), rows in itertools.product(PRODUCTS.items(), ROWS):
        for by, candidates in (("gated" if "gate" in name else "", tried["products"]), ("torch", {"torch": {}})):
            make = partial(product, n, k, rows, by)
            found.append(Case("products", (name,), 2 * n * k * rows, make, candidates, rows))
    return found


@contextlib.contextmanager
def trying(settings: Mapping[str, Any]) -> Iterator[None]:
    """Replace constants during the block: `NAME` is one of this module, `MODULE.NAME` one of kernels/cuda."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for name, value in settings.items():
            place, _, constant = name.rpartition(".")
            module = import_module(f"pypto_serving.kernels.cuda.{place}" if place else __name__)
            old = getattr(module, constant)
            before.append((module, constant, old))
            setattr(module, constant, replace(old, **value) if isinstance(value, dict) else value)
        yield
    finally:
        for module, constant, old in before:
            setattr(module, constant, old)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Return what a call launches, without launching it."""
    found: list[Any] = []
    with recording(found.append):
        call()
    return [each for each in found if isinstance(each, Launch)]


def kind_of(launch: Launch) -> str:
    """Return what a compiled kernel depends on: constants, types, and which integers are 1 or divisible by 16."""
    ints = [(each == 1, each % 16 == 0) if isinstance(each, int) else type(each) for each in launch.arguments]
    return str((launch.kernel.__name__, ints, sorted(launch.constants.items())))


UNITS: dict[str, tuple[str, Callable[[float, float, float], float]]] = {
    "decodes": ("% of bandwidth", lambda work, taken_s, bandwidth: 100 * work / taken_s / bandwidth),
    "chunks": ("TFLOP/s", lambda work, taken_s, bandwidth: work / taken_s / 1e12),
    "products": ("us", lambda work, taken_s, bandwidth: taken_s * 1e6),
}


def measure_kernels(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Time all cases; after each kind, print a table and yield its figures.

    The figure of a candidate that fails is "-", that of one that launches what an earlier one does "=".
    """
    for kind, every in itertools.groupby(cases(), lambda case: case.kind):
        lines: dict[tuple[Any, ...], dict[Any, str]] = {}
        try:
            for case in every:
                seen: set[str] = set()
                for candidate, settings in case.candidates.items():
                    line, column = ((*case.name, candidate), case.column) if case.column else (case.name, candidate)
                    try:
                        with trying(settings):
                            calls = case.make()
                            known = str([(each.grid, kind_of(each)) for each in launches_of(calls[0])])
                            figure = "="
                            if known not in seen:
                                figure = f"{UNITS[kind][1](case.work, seconds(calls), bandwidth):.1f}"
                            seen.add(known)
                    except Exception as error:
                        print(f"{kind} {line} {column}: {error!r}", file=sys.stderr)
                        figure = "-"
                    lines.setdefault(line, {})[column] = figure
        finally:  # also when this process is told to end
            shown = with_best(lines) if kind == "products" else lines
            first, columns = next(iter(shown.items()))
            heads = [f"{kind}, {UNITS[kind][0]}", *[""] * (len(first) - 1), *columns]
            print(table([heads, *([*line, *figures.values()] for line, figures in shown.items())]), flush=True)
        yield {kind: [[*line, figures] for line, figures in lines.items()]}


def with_best(lines: Mapping[tuple[Any, ...], Mapping[Any, str]]) -> dict[tuple[Any, ...], Mapping[Any, str]]:
    """Return the lines of the code as it is and of torch, and one of the best candidates by column."""
    shown: dict[tuple[Any, ...], Mapping[Any, str]] = {}
    for matrix in dict.fromkeys(line[0] for line in lines):
        ours = {line[1]: figures for line, figures in lines.items() if line[0] == matrix and line[1] != "torch"}
        best: dict[Any, str] = {}
        for column in next(iter(ours.values())):
            tried = [(float(each[column]), name) for name, each in ours.items() if each.get(column, "-") not in "-="]
            best[column] = "{} {}".format(*min(tried)) if tried else "-"
        shown |= {
            line: figures for line, figures in lines.items() if line[0] == matrix and line[1] in ("as it is", "torch")
        }
        shown[matrix, "best"] = best
    return shown


def compile_ahead() -> int:
    """Compile all that is measured, in processes; return how many kernels were compiled."""
    command = [sys.executable, __file__]
    processes = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE) for i in range(COMPILERS)]
    return sum(int(process.communicate()[0] or 0) for process in processes)


def compile_share(index: int) -> int:
    """Compile each COMPILERS-th kernel, with tensors that have no memory; return the number of kernels."""
    found: dict[str, Launch] = {}
    for case in cases():
        for settings in case.candidates.values():
            with torch.device("meta"), trying(settings), contextlib.suppress(Exception):
                found |= {kind_of(each): each for each in launches_of(case.make()[0])}
    share = list(found.values())[index::COMPILERS]
    for each in share if CARD else []:
        with contextlib.suppress(Exception):
            each.kernel.warmup(*each.arguments, grid=each.grid, **each.constants)
    return len(share)


torch.set_default_device("cuda" if CARD else "cpu")
if __name__ == "__main__":
    print(compile_share(int(sys.argv[1])))
