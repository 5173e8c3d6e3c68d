"""Disks to open stores on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.blocks import Disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "kv", [])
    yield disk
    for store in disk.stores:
        store.close()
