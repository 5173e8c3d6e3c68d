"""Qwen3 in PyPTO without PyPTO: what the compiler will see."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pypto_serving.model.contract import StageName
from pypto_serving.model.qwen3 import programs
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.model.qwen3.pypto import Qwen3Contract
from pypto_serving.model.registry import read_config
from tests.checkpoints import make_checkpoint


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


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_host_functions_take_what_the_contract_says(stage: StageName, tmp_path: Path) -> None:
    (function,) = ast.parse(programs._host_text(stage)).body
    assert isinstance(function, ast.FunctionDef) and function.name == f"qwen3_{stage}_host"
    model = read_config(make_checkpoint(tmp_path)).model
    assert isinstance(model, Qwen3Config)
    arguments = Qwen3Contract(model, "2026-08", 512, 64).stages[stage]
    assert [each.arg for each in function.args.args] == [each.name for each in arguments]


@pytest.mark.parametrize("outputs", [32, 64, 96, 128, 256, 512, 1536])
def test_no_loop_over_tiles_has_one_trip(outputs: int) -> None:
    tile = programs._tile(outputs, 256)
    assert outputs % tile == 0 and outputs // tile >= 2


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"), [(512, 768, 128), (512, 640, 64), (128, 768, 32), (64, 1536, 16), (512, 4096, 32)]
)
def test_tiles_are_those_that_the_compiler_takes(outputs: int, inputs: int, tile: int) -> None:
    """As found by compiling: 640 inputs would take five steps with a tile of 128, and 1,536 three with one of 32."""
    assert programs._tile(outputs, inputs) == tile


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({}, ""),
        ({"hidden": 960, "intermediate": 3072}, ""),
        ({"head_dim": 48}, "head_dim is 48, but must be a multiple of 32"),
        ({"heads": 34}, "17 heads share a KV head, but at most 16 can"),
        ({"hidden": 1024}, "hidden_size is 1024, but must be a multiple of 32 up to 960"),
        ({"padded_vocab": 152064}, ""),
        (
            {"padded_vocab": 152064, "hidden": 640},
            "the vocabulary has 152064 tokens with padding, but with a hidden_size of 640 at most 94144 fit",
        ),
        ({"intermediate": 80}, "intermediate_size is 80, but must be a multiple of 32"),
        (
            {"intermediate": 2144},
            "intermediate_size is 2144, which does not divide into equal steps that fit; 2112 would do",
        ),
        (
            {"heads": 32, "kv_heads": 8, "head_dim": 288},
            "heads * head_dim is 9216, which does not divide into equal steps that fit; 8192 would do",
        ),
    ],
)
def test_sizes_that_the_compiler_refuses_are_named(overrides: dict[str, int], problem: str) -> None:
    assert programs.obstacle(sizes(**overrides)) == problem


def test_scratch_has_room_for_whole_tiles() -> None:
    constants = programs._constants(sizes(heads=3, kv_heads=1), 48)
    assert constants["QUERY_ROWS"] == (48 + programs.ROWS) * 3
    assert constants["GROUP"] == 3
