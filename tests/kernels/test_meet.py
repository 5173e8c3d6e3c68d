"""Ranks that share memory: they meet within steps, follow a leader, and end when one is gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pypto_serving.kernels import Board, Engine, Meeting, Peers, RanksGone, Recording, SharedMemory, runnable
from tests.kernels.layouts import random_bf16
from tests.kernels.stage import engine_of, int32, matrix_of

pytestmark = pytest.mark.skipif(not runnable(), reason="built without a C++ compiler")

TOKENS, COLUMNS, LINKS = 5, 32, 6


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

    def __init__(self, rank: int, ranks: int, peers: Peers, engine: Engine, width: int, links: range) -> None:
        mine = slice(rank * width // ranks, (rank + 1) * width // ranks)
        self.rows = [peers.zeros(np.float32, TOKENS, width) for _ in range(2)]
        self.step = Recording(engine)
        weights = random_bf16(np.random.default_rng(0), width, width)
        strips, ones = np.zeros(TOKENS * width // 2, np.uint32), np.ones(width, np.float32)
        peers.begin_stage(self.step)
        for link in links:
            x, out = self.rows[link % 2], self.rows[1 - link % 2]
            self.step.rms_norm(x, ones, 1e-6, strips)
            self.step.linear(strips, matrix_of(weights[mine]), out[:, mine])
            peers.meet(self.step, out)
        peers.end_stage(self.step)

    @classmethod
    def alone(cls, width: int) -> Chain:
        return cls(0, 1, Peers(), engine_of(runnable()[0]), width, range(LINKS))

    @classmethod
    def ranks(cls, memory: SharedMemory, ranks: int, threads: int = 1, stages: int = 1) -> list[Chain]:
        chains = []
        for number in range(stages * ranks):
            stage, rank = divmod(number, ranks)
            peers = Peers(rank, ranks, SharedMemory(memory.fd), stage, stages)
            links = range(stage * LINKS // stages, (stage + 1) * LINKS // stages)
            chains.append(cls(rank, ranks, peers, Engine(threads=threads), ranks * COLUMNS, links))
        return chains

    def play(self, tokens: int = TOKENS) -> None:
        self.step.replay(*step_arrays(tokens))


def step_arrays(tokens: int) -> Any:
    starts, lengths = int32([0, tokens]), int32([tokens])
    tables = (int32(np.zeros((1, 1))),)
    return (
        int32(np.zeros(tokens)),
        int32(np.arange(tokens)),
        starts,
        lengths,
        int32([]),
        (int32(range(tokens)),),
        tables,
    )


def start(width: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((TOKENS, width)).astype(np.float32)


@pytest.mark.parametrize(("ranks", "threads", "stages"), [(2, 1, 1), (2, 3, 1), (3, 1, 1), (2, 1, 2), (1, 2, 3)])
def test_ranks_compute_what_one_does(memory: SharedMemory, ranks: int, threads: int, stages: int) -> None:
    width, steps = ranks * COLUMNS, 40
    alone, group = Chain.alone(width), Chain.ranks(memory, ranks, threads, stages)
    assert alone.step.names.count("meet") == 0
    within, between = LINKS // stages if ranks > 1 else 0, stages if stages > 1 else 0
    assert [rank.step.names.count("meet") for rank in group] == [within + between] * len(group)
    alone.rows[0][...] = group[0].rows[0][...] = start(width)
    for _ in range(steps):
        alone.play()

    def play(rank: Chain) -> None:
        for _ in range(steps):
            rank.play()

    at_once(*(lambda rank=rank: play(rank) for rank in group))
    for rank in group:
        assert np.array_equal(rank.rows[0], alone.rows[0])
        assert np.array_equal(rank.rows[1], alone.rows[1])


def test_meetings_are_timed(memory: SharedMemory) -> None:
    first, second = Chain.ranks(memory, 2, threads=2)
    seconds = np.zeros(len(first.step.names))
    at_once(lambda: first.step.replay(*step_arrays(TOKENS), seconds), second.play)
    assert (seconds > 0).all()


def test_a_step_ends_when_its_meeting_is_closed(memory: SharedMemory) -> None:
    waits, never_comes = Chain.ranks(memory, 2, threads=2)
    waits.rows[1][...] = 7
    with ThreadPoolExecutor(1) as pool:
        playing: Future[None] = pool.submit(waits.play)
        Meeting(SharedMemory(memory.fd).zeros(np.uint8, Meeting.num_bytes(2)), 1, 2).close()
        with pytest.raises(RanksGone):
            playing.result()
    with pytest.raises(RanksGone):
        never_comes.play()
    assert (waits.rows[0] == 0).all(), "operations after the meeting were computed"


def test_ranks_follow_a_leader(memory: SharedMemory) -> None:
    leader, follower = Chain.ranks(memory, 2)
    steps = SharedMemory.create()
    boards = Board(steps), Board(SharedMemory(steps.fd))
    os.close(steps.fd)
    buffers = [[np.zeros(8, np.int32) for _ in range(6)] for _ in range(2)]
    arrays = [(*b[:5], (b[5],), (b[5].reshape(1, 8),)) for b in buffers]
    alone = Chain.alone(2 * COLUMNS)
    leader.rows[0][...] = alone.rows[0][...] = start(2 * COLUMNS)

    def lead() -> None:
        for number in range(150):
            tokens = 1 + number % TOKENS
            for filled, values in zip(buffers[number % 2], step_arrays(tokens)[:5], strict=False):
                filled[: len(values)] = values
            boards[0].publish(number % 2, tokens, 1, 0)
            leader.play(tokens)
            alone.play(tokens)
        boards[0].publish_last()

    _, ended = at_once(lead, lambda: boards[1].follow(follower.step, arrays))
    assert ended
    assert np.array_equal(leader.rows[0], alone.rows[0])
    assert np.array_equal(leader.rows[1], alone.rows[1])


def test_followers_return_when_the_board_is_closed(memory: SharedMemory) -> None:
    board, same = Board(memory), Board(SharedMemory(memory.fd))
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(board.follow, Recording(engine_of(runnable()[0])), [step_arrays(1)])
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


def test_meetings_refuse_what_cannot_meet(memory: SharedMemory) -> None:
    counts = memory.zeros(np.uint8, Meeting.num_bytes(2))
    for rank, ranks in [(2, 2), (-1, 2), (0, 3)]:
        with pytest.raises(ValueError, match="cannot meet"):
            Meeting(counts, rank, ranks)
