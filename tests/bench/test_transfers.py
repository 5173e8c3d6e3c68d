"""Transfers in virtual time: one at a time per tier and kind."""

from __future__ import annotations

import math

import pytest

from pypto_serving.bench.simulator import TierSpeed, VirtualTransfers
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.tier import TransferDone, TransferJob

SPEEDS = {
    "host": TierSpeed(latency_s=0.5, bytes_per_s=100.0),
    "disk": TierSpeed(latency_s=1.0, bytes_per_s=10.0),
}


def job(job_id, kind="load", tier="host", pieces=2):
    ids = pack_ids(range(pieces))
    return TransferJob(job_id=job_id, kind=kind, tier=tier, groups=ids, blocks=ids, slots=ids, keys=bytes(16) * pieces)


@pytest.fixture
def transfers():
    return VirtualTransfers(SPEEDS)


def test_a_job_takes_latency_and_bytes(transfers):
    assert transfers.next_s == math.inf and transfers.due(1e9) == []
    transfers.submit(job(1), 50, 10.0)
    assert transfers.next_s == 11.0
    assert transfers.due(10.99) == []
    assert transfers.due(11.0) == [TransferDone(1, b"\1\1", 1.0)]
    assert transfers.next_s == math.inf


def test_jobs_of_one_lane_wait_for_each_other(transfers):
    transfers.submit(job(1), 50, 0.0)
    transfers.submit(job(2), 100, 0.0)
    transfers.submit(job(3), 0, 9.0)
    assert [done.elapsed_s for done in transfers.due(9.5)] == [1.0, 1.5, 0.5]


def test_tiers_and_directions_do_not_wait_for_each_other(transfers):
    transfers.submit(job(1, tier="disk"), 10, 0.0)
    transfers.submit(job(2, kind="store"), 100, 0.0)
    transfers.submit(job(3), 50, 0.0)
    assert [done.job_id for done in transfers.due(1.0)] == [3]
    assert [done.job_id for done in transfers.due(5.0)] == [2, 1]


def test_jobs_that_end_together_come_in_order(transfers):
    for job_id, tier, num_bytes in ((7, "disk", 0), (3, "host", 50)):
        transfers.submit(job(job_id, tier=tier), num_bytes, 0.0)
    assert [done.job_id for done in transfers.due(1.0)] == [7, 3]


def test_nothing_is_found(transfers):
    transfers.submit(job(1, kind="find", pieces=3), 0, 0.0)
    assert transfers.due(0.5) == [TransferDone(1, b"\0\0\0", 0.5)]


def test_a_tier_without_speed_is_an_error(transfers):
    with pytest.raises(KeyError):
        transfers.submit(job(1, tier="remote"), 1, 0.0)
