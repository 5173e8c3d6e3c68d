"""Checkpoints are made once per run; programs are cheap to load again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`checkpoint(kind, **overrides)`: a directory, made on first use."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", **overrides: Any) -> Path:
        key = f"{kind} {sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(kind), kind, **overrides)
        return made[key]

    return make
