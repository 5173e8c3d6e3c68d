"""Answers of a whole replica are the right ones under any schedule; see replicas.py for what that means."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pypto_serving.types.tier import Tier
from tests.model.deepseek_v4.replicas import SUBJECTS, TEMPERATURES, Oracle, Schedule, run_schedule
from tests.needs import needs_kernels
from tests.thinning import some

pytestmark = pytest.mark.golden

BELOW: tuple[tuple[Tier, ...], ...] = (("host",), ("disk",), ("host", "disk"))
KINDS: dict[str, Callable[[int], Schedule]] = {
    "preemption": lambda seed: Schedule(seed, crowded=True),
    "tiers": lambda seed: Schedule(seed, BELOW[seed % 3]),
    "deaths": lambda seed: Schedule(seed, ((), *BELOW)[seed % 4], dies=True),
    "restarts": lambda seed: Schedule(seed, BELOW[1:][seed % 2], restarts=True),
}
EVENTS: dict[str, tuple[str, ...]] = {
    "preemption": ("preemptions", "device, within an answer"),
    "tiers": ("host, common checkpoint", "disk, common checkpoint", "host, end of a prompt", "disk, end of a prompt"),
    "deaths": ("deaths", "host, end of a prompt", "disk, end of a prompt", "disk, within an answer"),
    "restarts": ("disk, common checkpoint", "disk, end of a prompt"),
}
"""What must have happened in some of fifty schedules of a kind, beside hits at checkpoints on the device."""

FATES = "accepted", "rejected"
DRAFTS = tuple(f"{fate} drafts, {asked}" for fate in FATES for asked in TEMPERATURES)

Oracles = Callable[[str], Oracle]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    @functools.cache
    def make(name: str) -> Oracle:
        return Oracle.make(SUBJECTS[name], tmp_path_factory.mktemp("model"))

    return make


def run(oracle: Oracle, kind: str, seeds: range, disk: Path) -> Counter[str]:
    """One replica after the other; those with a disk find what earlier ones left there. Counts what happened.

    With draft layers, each has accepted and rejected drafts.
    """
    totals, schedules = Counter[str](), Counter[str]()
    for seed in seeds:
        counts = run_schedule(oracle, KINDS[kind](seed), disk)
        for fate in FATES if counts["draft layers"] else ():
            assert sum(counts[f"{fate} drafts, {asked}"] for asked in TEMPERATURES), f"seed {seed}: none {fate}"
        totals.update(counts)
        schedules.update(name for name, count in counts.items() if count)
    print(
        f"{kind}: {len(seeds)} schedules", *(f"{n}: {totals[n]} in {schedules[n]}" for n in sorted(totals)), sep="\n  "
    )
    assert kind != "deaths" or schedules["deaths"] == len(seeds)
    return totals


FEW = dict(zip(SUBJECTS, (1, 1, 2, 1), strict=True))
"""Schedules of each kind when time counts."""

subjects = pytest.mark.parametrize(
    "subject", [pytest.param(name, marks=needs_kernels if of.native else ()) for name, of in SUBJECTS.items()]
)


@pytest.mark.parametrize(
    "subject",
    [
        *some([name for name, of in SUBJECTS.items() if not of.native]),
        *(pytest.param(name, marks=needs_kernels) for name, of in SUBJECTS.items() if of.native),
    ],
)
def test_some_schedules(oracles: Oracles, memory_disk: Path, subject: str) -> None:
    count = FEW[subject]
    found = (run(oracles(subject), kind, range(4, 4 + count), memory_disk / kind) for kind in KINDS)
    totals = sum(found, Counter[str]())
    names = ("preemptions", "deaths", "device, end of a prompt", "disk, end of a prompt", *DRAFTS)
    for name in names:
        assert totals[name], f"never: {name}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 1200, 50))
@pytest.mark.parametrize("kind", KINDS)
@subjects
def test_two_hundred_schedules(oracles: Oracles, memory_disk: Path, subject: str, kind: str, first: int) -> None:
    totals = run(oracles(subject), kind, range(first, first + 50), memory_disk)
    for name in ("device, common checkpoint", "device, end of a prompt", *EVENTS[kind], *DRAFTS):
        assert totals[name], f"never: {name}"
