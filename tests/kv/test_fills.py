"""Fills from several tiers: who is credited with what."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.kv.promotion import PrefixLoad
from pypto_serving.model.null_models import plain_groups
from pypto_serving.types.tier import (
    KEY_BYTES,
    TIERS,
    Tier,
    TierConfig,
    TierInventory,
    TransferDone,
    TransferJob,
)
from tests.kv.groups import take_jobs

BLOCK = 16
TOKENS = array("i", range(10 * BLOCK + 1))


def num_pieces(job: TransferJob) -> int:
    return len(job.groups) // 4


def filled_from_two_tiers(measured: bool = True) -> tuple[KVCacheManager, dict[Tier, TransferJob]]:
    """A manager that begins to load ten blocks for the request "b": six from host memory, four from disk."""
    groups = plain_groups(BLOCK)
    configs = [TierConfig(tier=tier, size_bytes=0, num_slots=(32,)) for tier in TIERS if tier in ("host", "disk")]
    kv = KVCacheManager(groups, (64,), tiers=configs)
    match = kv.match("a", TOKENS)
    kv.reserve("a", len(TOKENS), match)
    kv.commit("a", TOKENS, len(TOKENS), len(TOKENS))
    keys = list(kv._sequences["a"].tables[0].keys)
    kv.forget("a")
    while jobs := take_jobs(kv, 1.0):
        for job in jobs:
            kv.transferred(TransferDone(job.job_id, b"\1" * num_pieces(job), 0.001), 1.0)
    kv.clear(("device",))
    host = kv.tiers.tiers[0]
    for key in keys[6:]:
        place = host.find(kv.groups[0], key)
        assert place is not None
        host.pools[kv.groups[0]].drop(place)
    if measured:
        kv.tiers.promotions.record_prefill(100, 1.0)
    assert kv.load_prefix("b", TOKENS, kv.match("b", TOKENS)) is PrefixLoad.BEGUN
    loads = {job.tier: job for job in take_jobs(kv, 1.0)}
    assert {tier: num_pieces(job) for tier, job in loads.items()} == {"host": 6, "disk": 4}
    return kv, loads


@pytest.mark.parametrize("last", ["host", "disk"])
@pytest.mark.parametrize("measured", [True, False])
def test_each_tier_is_credited_with_what_came_from_it(last: Tier, measured: bool) -> None:
    """Also where no prompt was computed before, as after a restart: then once the first one is."""
    kv, loads = filled_from_two_tiers(measured)
    took_s: dict[Tier, float] = {"host": 0.25, "disk": 0.5}
    for tier in sorted(loads, key=lambda tier: tier == last):
        kv.transferred(TransferDone(loads[tier].job_id, b"\1" * num_pieces(loads[tier]), took_s[tier]), 2.0)
    match = kv.match("b", TOKENS)
    assert match == 10 * BLOCK
    assert kv.sources("b", match) == Counter(host=6 * BLOCK, disk=4 * BLOCK)
    if not measured:
        assert all(tier.counters.saved_s == 0 for tier in kv.tiers.tiers)
        kv.tiers.promotions.record_prefill(100, 1.0)
    saved_s = {tier.config.tier: tier.counters.saved_s for tier in kv.tiers.tiers}
    assert saved_s == pytest.approx({"host": 6 * BLOCK / 100 - 0.25, "disk": 4 * BLOCK / 100 - 0.5})
    kv.check()


def test_what_arrived_of_a_fill_that_failed_came_from_its_tier() -> None:
    kv, loads = filled_from_two_tiers()
    assert kv.transferred(TransferDone(loads["disk"].job_id, b"\1\0\1\1", 0.1), 2.0) == []
    assert kv.transferred(TransferDone(loads["host"].job_id, b"\1" * 6, 0.1), 2.0) == ["b"]
    assert not kv.holds_fill("b")
    match = kv.match("b", TOKENS)
    assert match == 7 * BLOCK
    assert kv.sources("b", match) == Counter(host=6 * BLOCK, disk=BLOCK)
    assert kv.load_prefix("b", TOKENS, match) is PrefixLoad.COMPUTE
    assert all(tier.counters.saved_s == 0 for tier in kv.tiers.tiers)
    kv.match("c", TOKENS)
    assert kv.sources("c", match) == Counter(device=7 * BLOCK), "another request finds them on the device"
    kv.check()


def test_what_did_not_arrive_is_not_credited_even_if_others_compute_it() -> None:
    kv, loads = filled_from_two_tiers()
    kv.transferred(TransferDone(loads["host"].job_id, b"\1" * 6, 0.1), 2.0)
    kv.transferred(TransferDone(loads["disk"].job_id, b"\0" * 4, 0.1), 2.0)
    match = kv.match("c", TOKENS)
    kv.reserve("c", len(TOKENS), match)
    kv.commit("c", TOKENS, len(TOKENS), len(TOKENS))
    match = kv.match("b", TOKENS)
    assert kv.sources("b", match) == Counter(host=6 * BLOCK, device=4 * BLOCK)


def test_discarded_blocks_are_found_nowhere() -> None:
    """Neither on the device, nor in a tier, nor once a load or store that was under way has ended."""
    kv, loads = filled_from_two_tiers()
    kv.match("a", TOKENS)
    kv.discard("a")
    for job in loads.values():
        kv.transferred(TransferDone(job.job_id, b"\1" * num_pieces(job), 0.1), 2.0)
    kv.forget("a")
    kv.forget("b")
    kv.check()
    match = kv.match("c", TOKENS)
    assert match == 0
    assert kv.load_prefix("c", TOKENS, match) is PrefixLoad.COMPUTE

    kv.reserve("c", len(TOKENS), match)
    kv.commit("c", TOKENS, len(TOKENS), len(TOKENS))
    kv.release("c")
    stores = take_jobs(kv, 3.0)
    assert stores, "nothing is being stored"
    kv.discard("c")
    for job in stores:
        kv.transferred(TransferDone(job.job_id, b"\1" * num_pieces(job), 0.1), 3.0)
    kv.check()
    assert kv.match("d", TOKENS) == 0
    assert kv.load_prefix("d", TOKENS, kv.match("d", TOKENS)) is PrefixLoad.COMPUTE
    assert not take_jobs(kv, 4.0)


def test_what_a_shared_store_still_holds_of_discarded_blocks_is_not_loaded() -> None:
    kv = KVCacheManager(plain_groups(BLOCK), (64,), tiers=[TierConfig(tier="remote", size_bytes=0, num_slots=(32,))])
    kv.open((64,), b"", [TierInventory("remote", b"", b"", b"", writable=True, shared=True)])
    stored: set[bytes] = set()

    def transfer() -> set[str]:
        """Do all transfers as a store does that forgets nothing; the kinds that there were."""
        kinds = set()
        while jobs := take_jobs(kv, 1.0):
            for job in jobs:
                keys = [job.keys[i : i + KEY_BYTES] for i in range(0, len(job.keys), KEY_BYTES)]
                stored.update(keys if job.kind == "store" else ())
                kv.transferred(TransferDone(job.job_id, bytes(key in stored for key in keys), 0.1), 1.0)
                kinds.add(job.kind)
        return kinds

    def compute(request_id: str) -> int:
        """The tokens that a request found."""
        while kv.load_prefix(request_id, TOKENS, kv.match(request_id, TOKENS)) is PrefixLoad.BEGUN:
            assert transfer()
        match = kv.match(request_id, TOKENS)
        kv.reserve(request_id, len(TOKENS), match)
        kv.commit(request_id, TOKENS, len(TOKENS), len(TOKENS))
        return match

    assert compute("a") == 0
    kv.forget("a")
    assert transfer() == {"store"} and stored
    kv.clear(("device",))
    assert compute("b") == 10 * BLOCK
    kv.discard("b")
    kv.forget("b")
    assert compute("c") == 0
    kv.forget("c")
    assert "store" not in transfer(), "the store keeps what it has, so it would be corrupt again"
    kv.check()


def test_who_waits_for_blocks_of_an_aborted_request_stops_waiting_when_they_are_overdue() -> None:
    kv, _ = filled_from_two_tiers()
    assert kv.load_prefix("c", TOKENS, kv.match("c", TOKENS)) is PrefixLoad.BEGUN, (
        "another request loads the same blocks"
    )
    kv.forget("b")
    assert kv.expire_fills(1000.0) == ["c"]
    assert kv.load_prefix("c", TOKENS, kv.match("c", TOKENS)) is PrefixLoad.COMPUTE, "the tiers are stuck"
    assert kv.expire_fills(2000.0) == []
    kv.check()


def test_the_late_end_of_a_load_wakes_nobody_who_gave_it_up() -> None:
    """The requests wait for other loads by then: woken early, they would run on blocks that are being filled."""
    kv, loads = filled_from_two_tiers()
    assert kv.load_prefix("c", TOKENS, kv.match("c", TOKENS)) is PrefixLoad.BEGUN
    assert kv.expire_fills(1000.0) == ["b", "c"]
    for job in loads.values():
        assert kv.transferred(TransferDone(job.job_id, b"\0" * num_pieces(job), 0.1), 1001.0) == []
    kv.check()


def test_stores_begun_together_leave_half_of_the_free_blocks() -> None:
    """Others could not be taken before a store ends; with less than half, a small pool evicts blocks unstored."""
    config = TierConfig(tier="host", size_bytes=0, num_slots=(32,))
    kv = KVCacheManager(plain_groups(BLOCK), (15,), tiers=[config])
    kv.match("a", TOKENS)
    kv.reserve("a", len(TOKENS))
    kv.commit("a", TOKENS, len(TOKENS), len(TOKENS))
    kv.forget("a")
    assert [num_pieces(job) for job in take_jobs(kv, 1.0)] == [7], "of 14 free blocks"
