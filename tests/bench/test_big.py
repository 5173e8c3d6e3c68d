"""The table of big shapes: what is late, and the share of the bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import big
import make_checkpoint
import pytest

RECORD: dict[str, Any] = {
    "name": "14b",
    "file_bytes": 8_000_000_000,
    "token_bytes": 7_000_000_000,
    "reading_s": 20.0,
    "ready_s": 29.9,
    "peak_at_start": 9 << 30,
    "peak": 10 << 30,
    "rates": [3.0, 4.0, 5.0],
    "itls_ms": [250.0, 200.0, 200.0],
    "bandwidths": [35e9, 35e9, 70e9],
}


def test_a_start_may_take_ten_seconds_more_than_reading() -> None:
    assert "| 20.0 | 29.9 | 9.0 | 10.0 | 7.00 | 4.0 | 200.0 | 35 | 80% |" in big.row(RECORD)
    assert "| 30.1 (late) |" in big.row(RECORD | {"ready_s": 30.1})
    assert big.row(RECORD | {"token_bytes": 0}).endswith("| 35 |  |")
    assert big.HEAD.splitlines()[0].count("|") == big.row(RECORD).count("|")


def test_every_case_has_a_shape_and_a_format() -> None:
    for shape, format, _ in big.CASES.values():
        assert shape in make_checkpoint.SHAPES and format in make_checkpoint.FORMATS


def test_files_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big, "PIECE", 1000)
    (file := tmp_path / "file").write_bytes(bytes(2500))
    assert big.read_seconds([file, file]) > 0
