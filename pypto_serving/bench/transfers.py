"""Model the time of KV transfers between tiers, in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pypto_serving.types.tier import Tier, TransferDone, TransferJob, TransferKind

_INT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TierSpeed:
    """The speed of a tier: a job of n bytes takes `latency_s + n / bytes_per_s` seconds, in either direction."""

    latency_s: float
    bytes_per_s: float


SPEEDS: Mapping[Tier, TierSpeed] = {
    "host": TierSpeed(latency_s=20e-6, bytes_per_s=20e9),
    "disk": TierSpeed(latency_s=100e-6, bytes_per_s=3e9),
    "remote": TierSpeed(latency_s=1e-3, bytes_per_s=1e9),
}
"""Round figures, not measured: host memory over PCIe 4, one NVMe disk, a 10 Gbit/s network."""


class VirtualTransfers:
    """Owns the running transfers. Each tier does one job at a time per kind, in order of submission.

    Loads, stores and finds of one tier do not wait for each other. A job moves all of its pieces. Only this
    engine writes to a tier in virtual time, so a `find` finds nothing and takes only the latency.
    """

    def __init__(self, speeds: Mapping[Tier, TierSpeed] = SPEEDS) -> None:
        self._speeds = speeds
        self._free_s: dict[tuple[Tier, TransferKind], float] = {}
        self._pending: list[tuple[float, int, TransferDone]] = []
        self._num_submitted = 0

    def submit(self, job: TransferJob, num_bytes: int, now_s: float) -> None:
        """Queue a job of `num_bytes` in total. Raises KeyError for a tier without a speed."""
        speed, lane = self._speeds[job.tier], (job.tier, job.kind)
        moved = 0 if job.kind == "find" else num_bytes
        elapsed_s = speed.latency_s + moved / speed.bytes_per_s
        end_s = max(now_s, self._free_s.get(lane, 0.0)) + elapsed_s
        self._free_s[lane] = end_s
        flags = (b"\0" if job.kind == "find" else b"\1") * (len(job.groups) // _INT32_BYTES)
        self._num_submitted += 1
        done = TransferDone(job.job_id, flags, elapsed_s)
        heapq.heappush(self._pending, (end_s, self._num_submitted, done))

    def due(self, now_s: float) -> list[TransferDone]:
        """Remove and return the jobs that have ended by `now_s`, in order of their end."""
        ended = []
        while self._pending and self._pending[0][0] <= now_s:
            ended.append(heapq.heappop(self._pending)[2])
        return ended

    @property
    def next_s(self) -> float:
        """Return when the next job ends; infinite if none is running."""
        return self._pending[0][0] if self._pending else math.inf
