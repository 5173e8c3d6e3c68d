"""What tests of all areas share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

MEMORY = Path("/dev/shm")

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder for disk tiers of simulations, in memory if there is room, so that syncs cost nothing."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="pypto-test-") as folder:
        yield Path(folder)
