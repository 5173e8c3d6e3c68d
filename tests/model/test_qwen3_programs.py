"""Qwen3 in PyPTO without PyPTO: what the compiler will see."""

from __future__ import annotations

import ast
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pypto_serving.model.qwen3 import programs


def sizes(**overrides: Any) -> Any:
    bundled = {
        "hidden": 256,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 32,
        "intermediate": 512,
        "padded_vocab": 1024,
        "tokens": 64,
        "pages": 32,
        "positions": 4096,
        "eps": 1e-6,
    }
    return SimpleNamespace(**bundled | overrides)


def test_importing_needs_neither_pypto_nor_torch() -> None:
    code = "import sys, pypto_serving.model.qwen3.programs; assert not {'pypto', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_in_capitals_has_a_value() -> None:
    """A size without a value would show at the first compile only, on a machine that has PyPTO."""
    given = {*programs._constants(sizes(), 64), *programs._RUN_TIME_SIZES}
    files = [path for path in programs.sources() if path.name != "__init__.py"]
    trees = [ast.parse(path.read_text()) for path in files]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.isupper()}
    assert used == given


@pytest.mark.parametrize("outputs", [32, 64, 96, 128, 256, 512, 1536])
def test_no_loop_over_tiles_has_one_trip(outputs: int) -> None:
    tile = programs._tile(outputs)
    assert outputs % tile == 0 and outputs // tile >= 2


def test_scratch_has_room_for_whole_tiles() -> None:
    constants = programs._constants(sizes(heads=3, kv_heads=1), 48)
    assert constants["QUERY_ROWS"] == (48 + programs.ROWS) * 3
    assert constants["GROUP"] == 3
