"""The remote tier against a real pool on loopback, and without one."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from pypto_serving.store.base import Piece, digest
from pypto_serving.store.mooncake import PoolAddress
from pypto_serving.store.remote import (
    JOIN_TIMEOUT_S,
    RemoteStore,
    own_address,
    parse_address,
)
from tests.clock import VirtualClock
from tests.store.pool import Pool, free_port, missing, wait_until

FINGERPRINT = bytes(range(16))
BLOCK_BYTES = (256 << 10, 1000)
NO_POOL = missing()
needs_pool = [pytest.mark.e2e, pytest.mark.skipif(NO_POOL is not None, reason=str(NO_POOL))]

OpenStore = Callable[..., RemoteStore]


def pieces(count: int, seed: int = 0, group: int = 0) -> list[Piece]:
    rng = np.random.default_rng(seed)
    keys = random.Random(f"{seed} {group}")
    return [
        Piece(group, -1, keys.randbytes(16), rng.integers(0, 256, BLOCK_BYTES[group], dtype=np.uint8))
        for _ in range(count)
    ]


def blank(source: list[Piece]) -> list[Piece]:
    return [Piece(p.group, -1, p.key, np.zeros_like(p.memory)) for p in source]


def same(one: list[Piece], other: list[Piece]) -> bool:
    return all((a.memory == b.memory).all() for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    started = Pool()
    yield started
    started.stop()


@pytest.fixture
def open_store(pool: Pool) -> Iterator[OpenStore]:
    opened: list[RemoteStore] = []

    def open_joined(clock: VirtualClock | None = None, fingerprint: bytes = FINGERPRINT) -> RemoteStore:
        store = RemoteStore(parse_address(pool.url), fingerprint, BLOCK_BYTES, clock)
        opened.append(store)
        usable(store)
        return store

    yield open_joined
    for store in opened:
        store.close()


def usable(store: RemoteStore) -> None:
    """Wait until it has joined and the pool has memory."""
    wait_until(lambda: all(store.store(pieces(1, seed=99))))


def process_of(store: RemoteStore) -> psutil.Process:
    assert store._process is not None
    return psutil.Process(store._process._child.pid)


@pytest.mark.usefixtures("open_store")
class TestPool:
    pytestmark = needs_pool

    def test_one_replica_loads_what_another_stored(self, open_store: OpenStore) -> None:
        first, second = open_store(), open_store()
        assert process_of(first).pid != process_of(second).pid
        stored = [*pieces(40, 1), *pieces(5, 1, group=1), *pieces(3, 2)]
        assert first.store(stored) == [True] * 48
        assert second.find([p.key for p in stored] + [bytes(16)]) == [True] * 48 + [False]
        loaded = blank(stored)
        assert second.load(loaded) == [True] * 48
        assert same(loaded, stored)
        assert first.store(stored) == [True] * 48, "storing what is there already is no fault"
        assert first.inventory().shared and not first.inventory().keys

    def test_unknown_blocks_and_those_of_other_models_are_misses(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store(fingerprint=bytes(16))
        stored = pieces(4, 3)
        store.store(stored)
        assert other.find([p.key for p in stored]) == [False] * 4
        assert other.load(blank(stored)) == [False] * 4
        wanted = [*blank(stored)[:2], *pieces(2, 4)]
        assert store.load(wanted) == [True, True, False, False]
        assert other._is_up() and store._is_up(), "a miss is no fault"

    def test_objects_that_are_not_what_was_stored_are_misses(self, open_store: OpenStore) -> None:
        store = open_store()
        good, bad, short = pieces(3, 5)
        channel = store._channels["down"]
        request, (place,) = store._request("put", channel, [bad])
        place[:-16] = good.memory
        place[-16:] = np.frombuffer(digest(good.key, good.memory), dtype=np.uint8)
        assert store._ask("down", request) == [0]
        assert store.store([Piece(1, -1, short.key, short.memory[:1000])]) == [True]
        assert store.find([bad.key, short.key]) == [True, True]
        assert store.load(blank([bad, short])) == [False, False]
        assert store._is_up()

    def test_one_model_is_cleared_for_all_replicas(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store(fingerprint=bytes(16))
        stored = pieces(4, 3)
        assert all(store.store(stored)) and all(other.store(stored))
        store.clear()
        assert store.find([p.key for p in stored]) == [False] * 4
        assert other.find([p.key for p in stored]) == [True] * 4

    def test_threads_share_a_store(self, open_store: OpenStore) -> None:
        store = open_store()
        stored = [pieces(20, 10 + i) for i in range(3)]
        for part in stored:
            store.store(part)
        wrong: list[int] = []

        def load(i: int) -> None:
            for _ in range(5):
                loaded = blank(stored[i])
                if not all(store.load(loaded)) or not same(loaded, stored[i]):
                    wrong.append(i)

        threads = [threading.Thread(target=load, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for i in range(5):
            assert all(store.store(pieces(20, 20 + i)))
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_crashed_client_costs_misses_only(self, open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
        clock = VirtualClock()
        store, stored = open_store(clock), pieces(4, 6)
        assert all(store.store(stored))
        process_of(store).kill()
        with caplog.at_level(logging.INFO):
            wait_until(lambda: store._process is None or not store._is_up())
            for _ in range(20):
                assert store.load(blank(stored)) == [False] * 4
                assert store.store(stored) == [False] * 4
                assert store.find([stored[0].key]) == [False]
            assert store._process is None, "a client that is gone is not started again for each block"
            clock.advance(1.0)
            wait_until(lambda: all(store.load(blank(stored))))
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


class TestFaults:
    pytestmark = needs_pool

    def test_a_master_that_dies_and_comes_back(self, caplog: pytest.LogCaptureFixture) -> None:
        pool, clock = Pool("64MB"), VirtualClock()
        store, stored = RemoteStore(parse_address(pool.url), FINGERPRINT, BLOCK_BYTES, clock), pieces(4, 7)
        usable(store)
        assert all(store.store(stored)) and all(store.load(blank(stored)))
        pool.stop()
        with caplog.at_level(logging.INFO):
            for _ in range(10):
                assert store.load(blank(stored)) == [False] * 4
                assert store.store(stored) == [False] * 4
                assert store.find([p.key for p in stored]) == [False] * 4
            assert store._process is None
            clock.advance(1.0)
            assert store.find([stored[0].key]) == [False], "it tries to join again, and waits for nobody"
            clock.advance(JOIN_TIMEOUT_S + 1.0)
            assert store.find([stored[0].key]) == [False]
            assert store._process is None and store._backoff.next_wait_s == 4.0
            pool.start()
            clock.advance(60.0)
            usable(store)
            assert all(store.store(stored)) and all(store.load(blank(stored)))
            assert store._backoff.next_wait_s == 1.0
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "once per change"
        store.close()
        assert store.load(blank(stored)) == [False] * 4
        pool.stop()

    def test_a_master_that_stops_answering_holds_nobody_up(self) -> None:
        pool = Pool("64MB")
        store, stored = RemoteStore(parse_address(pool.url), FINGERPRINT, BLOCK_BYTES, VirtualClock()), pieces(4, 8)
        usable(store)
        store.store(stored)
        client = process_of(store)
        pool.pause_master()
        loaded = blank(stored)
        assert store.load(loaded) == [False] * 4
        assert not client.is_running() and same(loaded, blank(stored)), "nothing can write late"
        assert store.store(stored) == [False] * 4
        pool.resume_master()
        store.close()
        pool.stop()

    def test_a_full_pool_refuses_blocks_and_goes_on(self) -> None:
        pool = Pool("16MB")
        store = RemoteStore(parse_address(pool.url), FINGERPRINT, BLOCK_BYTES)
        usable(store)
        done = store.store(pieces(200, 9))
        assert any(done) and not all(done)
        assert store._is_up()
        store.close()
        pool.stop()


def test_without_a_pool_everything_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """Also where Mooncake itself is missing."""
    clock = VirtualClock()
    address = PoolAddress(master=f"127.0.0.1:{free_port()}")
    with caplog.at_level(logging.INFO):
        store, stored = RemoteStore(address, FINGERPRINT, BLOCK_BYTES, clock), pieces(2)
        for _ in range(3):
            assert store.store(stored) == store.load(blank(stored)) == store.find([bytes(16)] * 2) == [False] * 2
            clock.advance(JOIN_TIMEOUT_S + 1.0)
        wait_until(lambda: store._is_up() or store._process is None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    store.close()


def test_an_address_says_how_to_join() -> None:
    assert parse_address("mooncake://127.0.0.1") == PoolAddress(master="127.0.0.1:50051")
    assert parse_address("mooncake://[::1]:7?local_hostname=me").master == "[::1]:7"
    given = parse_address(
        "mooncake://10.0.0.1:7/?protocol=rdma&device=mlx5_0&segment_size=1GiB&local_hostname=h"
        "&metadata_server=http://10.0.0.1:8080/metadata"
    )
    assert given == PoolAddress(
        master="10.0.0.1:7",
        metadata_server="http://10.0.0.1:8080/metadata",
        protocol="rdma",
        device="mlx5_0",
        local_hostname="h",
        segment_bytes=1 << 30,
    )
    assert own_address("127.0.0.1") == "127.0.0.1"
