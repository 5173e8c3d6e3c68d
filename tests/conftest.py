"""What tests of all areas share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.thinning import ALL_EXAMPLES, thin

MEMORY = Path("/dev/shm")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

settings.register_profile("soak", deadline=None, max_examples=ALL_EXAMPLES)
settings.register_profile("quick", deadline=None, max_examples=ALL_EXAMPLES // 4)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    if _is_soak(config):
        settings.load_profile("soak")


def _is_soak(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr")) == "soak"


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for disk tiers of simulations, in memory if there is room, so that syncs cost nothing."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="pypto-test-") as folder:
        yield Path(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Thin tests before any are chosen by marks, and let tests of Hypothesis run in the soak, too."""
    thin(items)
    if _is_soak(config):
        for item in items:
            if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
                item.add_marker(pytest.mark.soak)
    yield
    _interleave(items)


def _interleave(items: list[pytest.Item]) -> None:
    """Let each process of a parallel run begin with its part of the slow tests, so that quick ones end the run."""
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes > 1:
        slow = [item for item in items if _is_slow(item)]
        quick = [item for item in items if not _is_slow(item)]
        items[:] = chain(*chain(*zip(_parts(slow, num_processes), _parts(quick, num_processes), strict=True)))


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("e2e", "golden"))


def _parts(items: Sequence[pytest.Item], count: int) -> list[Sequence[pytest.Item]]:
    """Neighbours stay together, for they share fixtures."""
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]
