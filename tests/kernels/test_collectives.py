"""Ranks that share memory: they wait at barriers within steps, replay published steps, and end when one is gone."""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import (
    Engine,
    NativeCollectives,
    RankBarrier,
    RanksGone,
    Recording,
    SharedMemory,
    StepBoard,
    runnable,
)
from pypto_serving.parallel.topology import Topology
from tests.kernels.layouts import narrow, random_bf16
from tests.kernels.stage import engine_of, int32, matrix_of
from tests.needs import needs_kernels

pytestmark = needs_kernels

TOKENS, COLUMNS, LINKS, VOCAB = 5, 32, 6, 50
IDS = np.arange(TOKENS)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    yield (shared := SharedMemory.create())
    os.close(shared.fd)


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """Run each task in a thread of its own; return what they return."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


class Chain:
    """One rank of products, each of which needs all columns of the one before and computes its own."""

    def __init__(
        self, rank: int, ranks: int, peers: NativeCollectives, engine: Engine, width: int, links: range
    ) -> None:
        mine = slice(rank * width // ranks, (rank + 1) * width // ranks)
        self.peers, self.step = peers, Recording(engine)
        self.rows = [peers.zeros(np.float32, TOKENS, width) for _ in range(2)]
        rng = np.random.default_rng(0)
        table = narrow(random_bf16(rng, VOCAB, width))
        weights = random_bf16(rng, width, width)
        strips, ones = np.zeros(TOKENS * width // 2, np.uint32), np.ones(width, np.float32)
        if links.start == 0:
            self.step.embed(table, self.rows[0])
            peers.barrier(self.step, self.rows[0])
        peers.begin_stage(self.step, self.rows[links.start % 2])
        for link in links:
            x, out = self.rows[link % 2], self.rows[1 - link % 2]
            self.step.rms_norm(x, ones, 1e-6, strips)
            self.step.linear(strips, matrix_of(weights[mine]), out[:, mine])
            peers.barrier(self.step, out)
        peers.end_stage(self.step, self.rows[links.stop % 2], self.rows[0])

    @classmethod
    def alone(cls, width: int) -> Chain:
        return cls(0, 1, NativeCollectives(), engine_of(runnable()[0]), width, range(LINKS))

    @classmethod
    def ranks(cls, memory: SharedMemory, ranks: int, threads: int = 1, stages: int = 1) -> list[Chain]:
        chains = []
        for number in range(stages * ranks):
            stage, rank = divmod(number, ranks)
            peers = NativeCollectives(Topology(ranks, stages).ranks[number], SharedMemory(memory.fd), stages)
            links = range(stage * LINKS // stages, (stage + 1) * LINKS // stages)
            chains.append(cls(rank, ranks, peers, Engine(threads=threads), ranks * COLUMNS, links))
        return chains

    def play(self, token_ids: np.ndarray, slot: int = 0) -> None:
        self.step.replay(*step_arrays(token_ids), slot=slot)

    def logits(self, tokens: int, slot: int = 0, number: int = 0) -> np.ndarray:
        return self.peers.await_logits(self.rows[0], slot, number)[:tokens].copy()


def step_arrays(token_ids: np.ndarray) -> Any:
    tokens = len(token_ids)
    positions, tables = int32(np.arange(tokens)), (int32(np.zeros((1, 1))),)
    return int32(token_ids), positions, int32([0, tokens]), int32([tokens]), positions, (positions,), tables


class Leader:
    """Leads a chain's other ranks, with as many steps in flight as there are stages."""

    def __init__(self, chain: Chain, slots: int) -> None:
        self._chain, self._memory = chain, SharedMemory.create()
        self._board = StepBoard(self._memory)
        self._buffers = [[np.zeros(8, np.int32) for _ in range(6)] for _ in range(slots)]
        self._held: deque[tuple[int, int, int]] = deque()
        self.found: list[np.ndarray] = []

    def replay_published(self, chain: Chain) -> None:
        arrays = [(*b[:5], (b[5],), (b[5].reshape(1, 8),)) for b in self._buffers]
        chain.step.replay_published(StepBoard(SharedMemory(self._memory.fd)).memory, arrays)

    def lead(self, steps: Sequence[np.ndarray]) -> None:
        for number, token_ids in enumerate(steps):
            slot = number % len(self._buffers)
            if len(self._held) == len(self._buffers):
                self._collect()
            for filled, values in zip(self._buffers[slot], step_arrays(token_ids)[:5], strict=False):
                filled[: len(values)] = values
            self._board.publish(slot, len(token_ids), 1, len(token_ids))
            self._chain.play(token_ids, slot)
            self._held.append((len(token_ids), slot, 1 + number))
        while self._held:
            self._collect()
        self._board.close()

    def _collect(self) -> None:
        self.found.append(self._chain.logits(*self._held.popleft()))


@pytest.mark.parametrize(("ranks", "threads", "stages"), [(2, 1, 1), (2, 3, 1), (3, 1, 1), (2, 1, 2), (1, 2, 3)])
def test_ranks_compute_what_one_does(memory: SharedMemory, ranks: int, threads: int, stages: int) -> None:
    rng = np.random.default_rng(1)
    steps = [rng.integers(0, VOCAB, 1 + i % TOKENS) for i in range(60)]
    alone, group = Chain.alone(ranks * COLUMNS), Chain.ranks(memory, ranks, threads, stages)
    assert "barrier" not in alone.step.names and all("barrier" in rank.step.names for rank in group)
    leader = Leader(group[0], stages)
    at_once(lambda: leader.lead(steps), *(lambda rank=rank: leader.replay_published(rank) for rank in group[1:]))
    for token_ids, found in zip(steps, leader.found, strict=True):
        alone.play(token_ids)
        assert np.array_equal(found, alone.logits(len(token_ids)))


def test_barriers_are_timed(memory: SharedMemory) -> None:
    first, second = Chain.ranks(memory, 2, threads=2)
    seconds = np.zeros(len(first.step.names))
    at_once(lambda: first.step.replay(*step_arrays(IDS), seconds), lambda: second.play(IDS))
    assert (seconds > 0).all()


def test_a_step_ends_when_its_barrier_is_closed(memory: SharedMemory) -> None:
    waits, never_comes = Chain.ranks(memory, 2, threads=2)
    waits.rows[1][...] = 7
    with ThreadPoolExecutor(1) as pool:
        playing: Future[None] = pool.submit(waits.play, IDS)
        RankBarrier(SharedMemory(memory.fd).zeros(np.uint8, RankBarrier.num_bytes(2)), 1).close()
        with pytest.raises(RanksGone):
            playing.result()
    with pytest.raises(RanksGone):
        never_comes.play(IDS)
    assert (waits.rows[1] == 7).all(), "operations after the barrier were computed"


def test_followers_return_when_the_board_is_closed(memory: SharedMemory) -> None:
    board, same = StepBoard(memory), StepBoard(SharedMemory(memory.fd))
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(Recording(engine_of(runnable()[0])).replay_published, board.memory, [step_arrays(IDS)])
        same.close()
        assert not following.result()


def test_shared_arrays_are_the_same_memory(memory: SharedMemory) -> None:
    shapes = [(np.uint8, (3,)), (np.float32, (5, 7)), (np.uint16, (70 << 20,)), (np.int32, (0,)), (np.uint32, (9,))]
    first = [memory.zeros(dtype, *shape) for dtype, shape in shapes]
    other = SharedMemory(memory.fd)
    second = [other.zeros(dtype, *shape) for dtype, shape in shapes]
    for number, (array, (dtype, shape)) in enumerate(zip(first, shapes, strict=True), 1):
        assert (array.dtype, array.shape) == (dtype, shape)
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[-1:] = number
    for number, array in enumerate(second, 1):
        assert (array[-1:] == number).all() and array.sum() == number * array[-1:].size


def test_files_that_must_be_small() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        with pytest.raises(ConfigError, match="ulimit -f"):
            SharedMemory.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_barriers_refuse_other_ranks(memory: SharedMemory) -> None:
    counts = memory.zeros(np.uint8, RankBarrier.num_bytes(2))
    for rank, awaited in [(2, range(2)), (-1, range(2)), (0, range(3)), (0, range(-1, 1))]:
        with pytest.raises(ValueError, match="cannot wait"):
            RankBarrier(counts, rank, awaited)
