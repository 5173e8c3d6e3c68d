"""KV events: the maps that routers read, and the publisher over real sockets."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest
import zmq

from pypto_serving.engine import kv_events as publisher_module
from pypto_serving.engine.kv_events import (
    ClearedMap,
    KVEventPublisher,
    KVEventWriter,
    RemovedMap,
    StoredMap,
    block_hash,
    spec_kind,
)
from pypto_serving.errors import ConfigError
from pypto_serving.kv.events import EventLog
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.kv import FullSpec, WindowSpec
from pypto_serving.types.tier import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier, TierConfig
from tests.engine.event_reader import END, EventReader
from tests.kv.groups import group
from tests.kv.tiered import GROUP_SETS, prompt
from tests.simulation import Simulation, null_config

ANYWHERE = "tcp://127.0.0.1:*"
NEVER = 1 << 63


def key(number: int) -> bytes:
    return bytes(8) + number.to_bytes(8, "big")


def stored(number: int, parent: int | None, first_token: int, tier: Tier = "device", group: int = 0) -> BlockStored:
    tokens = array("i", range(first_token, first_token + 4)).tobytes()
    return BlockStored(tier, group, key(number), b"" if parent is None else key(parent), tokens)


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    opened = KVEventPublisher(plain_groups(4), ANYWHERE, ANYWHERE)
    yield opened
    opened.stop()


def settle(publisher: KVEventPublisher, reader: EventReader) -> None:
    """Wait until all that was handed over is sent: a replay is served after it."""
    assert reader.replay(NEVER) == []
    assert not publisher._handed


def join(publisher: KVEventPublisher, reader: EventReader) -> None:
    """Wait until the subscription has arrived, which only a first batch can tell."""
    while not reader.receive(timeout_ms=5):
        publisher.publish([AllBlocksCleared("device")], 0.0)
    settle(publisher, reader)
    while reader.receive(timeout_ms=100):
        pass


# What is written.


def test_blocks_of_one_sequence_are_one_map() -> None:
    writer = KVEventWriter(plain_groups(4))
    events: list[KVEvent] = [stored(1, None, 0), stored(2, 1, 4), stored(3, 1, 8), stored(4, 3, 12)]
    first, second = writer.write(events)
    assert first == StoredMap([1, 2], None, list(range(8)), 4, None, "GPU", None, 0, "full_attention")
    assert second == StoredMap([3, 4], 1, list(range(8, 16)), 4, None, "GPU", None, 0, "full_attention")
    assert writer.write([BlockRemoved("device", 0, key(n)) for n in (4, 2)]) == [RemovedMap([4, 2], "GPU", 0)]


def test_tiers_and_groups_are_kept_apart() -> None:
    writer = KVEventWriter((group(FullSpec, 4), group(WindowSpec, 4, window=6)))
    events = [
        stored(1, None, 0, "host"),
        stored(2, 1, 4, "disk"),
        stored(3, 2, 8, "disk", 1),
        stored(4, 3, 0, "remote"),
    ]
    maps = writer.write(events)
    assert [(m.medium, m.group_idx) for m in maps if isinstance(m, StoredMap)] == [
        ("CPU", 0),
        ("DISK", 0),
        ("DISK", 1),
        ("EXTERNAL", 0),
    ]
    window = maps[2]
    assert isinstance(window, StoredMap)
    assert (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == ("sliding_window", 6)


def test_a_hash_is_the_end_of_the_key() -> None:
    assert block_hash(bytes(range(16))) == 0x08090A0B0C0D0E0F


def test_salted_blocks_are_not_announced() -> None:
    writer = KVEventWriter(plain_groups(4))
    salted = BlockStored("device", 0, key(1), b"", bytes(16), salted=True)
    assert writer.write([salted, BlockRemoved("device", 0, key(1))]) == []


def test_clearing_one_tier_names_its_blocks_while_others_hold_some() -> None:
    """Readers disagree on what AllBlocksCleared means for tiers below the device."""
    writer = KVEventWriter(plain_groups(4))
    writer.write([stored(1, None, 0), stored(2, 1, 4), stored(1, None, 0, "host")])
    (removed,) = writer.write([AllBlocksCleared("device")])
    assert isinstance(removed, RemovedMap)
    assert (sorted(removed.block_hashes), removed.medium) == ([1, 2], "GPU")
    assert writer.write([AllBlocksCleared("host")]) == [ClearedMap()]
    assert writer.write([AllBlocksCleared("device")]) == [ClearedMap()], "a new life says so, even if nothing was held"


def test_readers_count_one_group_of_a_model() -> None:
    """Dynamo counts full and MLA attention, and group 0 without a kind; other groups without a kind it drops."""
    groups = deepseek_v4_groups()
    kinds = {g.name: spec_kind(groups, i) for i, g in enumerate(groups)}
    assert [name for name, kind in kinds.items() if kind in ("full_attention", "mla_attention")] == ["cmp"]
    assert kinds["ori"] == "sliding_window" and kinds["idx"] is None and kinds["csa_state"] == "mamba"
    assert kinds[groups[0].name] is not None


# How it is sent.


def test_a_subscriber_follows_and_replays_a_gap(publisher: KVEventPublisher) -> None:
    with EventReader(publisher.endpoint, publisher.replay_endpoint) as reader:
        join(publisher, reader)
        last = reader.numbers[-1]
        publisher.publish([stored(1, None, 0), stored(2, 1, 4)], 1.0)
        publisher.publish([BlockRemoved("device", 0, key(2))], 2.0)
        reader.receive_until(lambda r: "BlockRemoved" in r.types)
        assert reader.numbers[-2:] == [last + 1, last + 2]
        assert reader.index == {("GPU", 0): {1: (None, [0, 1, 2, 3], 4)}}

    with EventReader(publisher.endpoint, publisher.replay_endpoint) as late:
        assert late.replay(last + 1) == [last + 1, last + 2]
        assert late.index == {("GPU", 0): {1: (None, [0, 1, 2, 3], 4)}}
        assert late.replay(0) == [*range(late.numbers[-1] + 1 - len(publisher._history), last + 3)]


def test_a_reader_that_never_reads_costs_a_bounded_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "HISTORY_BYTES", 1 << 20)
    publisher = KVEventPublisher(plain_groups(4096), ANYWHERE, ANYWHERE)
    with EventReader(publisher.endpoint, publisher.replay_endpoint, unread=1) as reader:
        join(publisher, reader)
        first = publisher._number
        wide = array("i", [1 << 30] * 4096).tobytes()
        for number in range(3000):
            publisher.publish([BlockStored("device", 0, key(number), b"", wide)], 0.0)
        settle(publisher, reader)
        assert publisher._history_bytes == sum(len(batch) for _, batch in publisher._history) <= 1 << 20
        assert publisher._number == first + 3000
        while reader.receive(timeout_ms=0):
            pass
        assert reader.numbers[-1] < first + 2500, "what it did not read was kept for it"
        assert reader.replay(reader.numbers[-1] + 1) == [number for number, _ in publisher._history]
    publisher.stop()


def test_the_history_holds_so_many_batches(publisher: KVEventPublisher) -> None:
    with EventReader(publisher.endpoint, publisher.replay_endpoint) as reader:
        first = publisher._number
        count = publisher_module.HISTORY_BATCHES + 500
        for number in range(count):
            publisher.publish([stored(number, None, 0)], 0.0)
        settle(publisher, reader)
        assert reader.replay(first) == [*range(first + 500, first + count)]


def test_a_reader_that_asks_without_end_holds_up_nobody(
    publisher: KVEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replays are answered in turn with those of others, and requests beyond a few are dropped."""
    monkeypatch.setattr(publisher_module, "REPLAY_BATCHES", 8)
    with (
        EventReader(publisher.endpoint, publisher.replay_endpoint) as greedy,
        EventReader(publisher.endpoint, publisher.replay_endpoint) as modest,
    ):
        join(publisher, modest)
        first, count = publisher._number, 200
        for number in range(count):
            publisher.publish([stored(number, None, 0)], 0.0)
        settle(publisher, modest)
        for _ in range(500):
            greedy.asking.send_multipart((b"", first.to_bytes(8, "big")))
        assert modest.replay(first + count - 20) == [*range(first + count - 20, first + count)]
        ends = 0
        while greedy.asking.poll(1000):
            ends += greedy.asking.recv_multipart()[2] == END
        assert publisher_module.WAITING_REPLAYS <= ends < 500
        assert not publisher._replays


def test_a_long_request_ends_the_connection_of_its_reader(publisher: KVEventPublisher) -> None:
    with (
        EventReader(publisher.endpoint, publisher.replay_endpoint) as long,
        EventReader(publisher.endpoint, publisher.replay_endpoint) as other,
    ):
        long.asking.send_multipart((b"", bytes(1 << 20)))
        assert not long.asking.poll(100)
        assert other.replay(NEVER) == []


def test_senseless_requests_are_ignored(publisher: KVEventPublisher) -> None:
    with EventReader(publisher.endpoint, publisher.replay_endpoint) as reader:
        for frames in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""]):
            reader.asking.send_multipart(frames)
        assert reader.replay(NEVER) == []


def test_a_later_life_goes_on_with_higher_numbers() -> None:
    first = KVEventPublisher(plain_groups(4), ANYWHERE, ANYWHERE)
    endpoint, replay_endpoint, number = first.endpoint, first.replay_endpoint, first._number
    first.stop()
    second = KVEventPublisher(plain_groups(4), endpoint, replay_endpoint)
    assert (second.endpoint, second.replay_endpoint) == (endpoint, replay_endpoint)
    assert second._number > number
    second.stop()
    second.publish([AllBlocksCleared("device")], 0.0)


def test_an_endpoint_in_use_is_named() -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(
        ConfigError, match=rf"^the option kv-events-replay is tcp://127\.0\.0\.1:{port}, which cannot be used: addr"
    ):
        KVEventPublisher(plain_groups(4), ANYWHERE, f"tcp://127.0.0.1:{port}")
    context.destroy()


# What the engine core says.


@pytest.mark.thinned(1)
@pytest.mark.parametrize("num_slots", [0, 1], ids=["device", "host tier"])
@pytest.mark.parametrize("kind", GROUP_SETS)
def test_readers_know_what_the_cache_holds(kind: str, num_slots: int) -> None:
    """Prefixes, evictions, loads, stores and a worker's death: the index equals the pools, hash by hash."""
    groups, num_blocks, slots = GROUP_SETS[kind]
    tiers = (TierConfig(tier="host", size_bytes=0, num_slots=slots),) if num_slots else ()
    publisher, rng = KVEventPublisher(groups, ANYWHERE, ANYWHERE), random.Random(kind)
    with EventReader(publisher.endpoint, publisher.replay_endpoint) as reader:
        sim = Simulation(null_config(groups, num_blocks, tiers=tiers, max_num_seqs=5), publisher)
        sim.executor.die_if = lambda plan: len(sim.last) == 20 and sim.executor.num_deaths == 0
        for _ in range(40):
            sim.add(prompt(rng), max_tokens=rng.randrange(1, 12))
            sim.run()
        settle(publisher, reader)
        reader.replay(0)
        kv = sim.core.scheduler.kv
        pools = {("GPU", group.index): group.pool for group in kv.groups}
        pools |= {("CPU", group.index): pool for tier in kv.tiers.tiers for group, pool in tier.pools.items()}
        assert any(pool.num_evicted for (medium, _), pool in pools.items() if medium == "GPU")
        for place, pool in pools.items():
            assert {block_hash(k) for k in pool._by_key} == set(reader.index[place])
        assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(reader.types)
        assert sim.core.scheduler.kv._events is not None and not sim.core.scheduler.kv._events.num_unknown
    publisher.stop()


def test_blocks_that_a_store_brought_are_told_once_a_request_describes_them() -> None:
    log = EventLog()
    log.held("disk", 0, key(1))
    log.held("disk", 0, key(2))
    assert log.take() == [] and log.num_unknown == 2
    content = (b"", bytes(16), False)
    assert log.lacks(0, key(1)) and not log.lacks(0, key(3))
    log.describe(0, key(1), content)
    log.held("device", 0, key(1))
    assert log.take() == [BlockStored(tier, 0, key(1), *content) for tier in ("disk", "device")]
    log.cleared("disk")
    log.held("disk", 0, key(2))
    log.gone("device", 0, key(1))
    assert log.take() == [AllBlocksCleared("disk"), BlockRemoved("device", 0, key(1))]
    assert log.num_unknown == 1 and not log.lacks(0, key(1))


def test_nothing_is_collected_when_nobody_asked() -> None:
    sim = Simulation(null_config())
    sim.add(range(60))
    sim.run()
    assert sim.core.scheduler.kv.take_events() == []
