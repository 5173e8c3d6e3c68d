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
from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.model.qwen3 import programs
from pypto_serving.model.qwen3.pypto import Qwen3Contract
from pypto_serving.model.registry import read_config
from tests.checkpoints import make_checkpoint


def sizes(**overrides: Any) -> Any:
    bundled = {
        "devices": 1,
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
    given = {*programs._constants(programs._of_device(sizes()), 64), *programs._RUN_TIME_SIZES}
    files = [path for path in programs.sources() if path.name != "__init__.py"]
    texts = [*(path.read_text() for path in files), *(programs._host_text(stage, 2) for stage in ("prefill", "decode"))]
    trees = [ast.parse(text) for text in texts]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.isupper()}
    assert used == given


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_host_functions_take_what_the_contract_says(stage: StageName, devices: int, tmp_path: Path) -> None:
    (function,) = ast.parse(programs._host_text(stage, devices)).body
    assert isinstance(function, ast.FunctionDef) and function.name == f"qwen3_{stage}_host"
    model = read_config(make_checkpoint(tmp_path)).model
    assert isinstance(model, DecoderConfig)
    arguments = Qwen3Contract(model, "2026-08", 512, 64, devices).stages[stage]
    assert [each.arg for each in function.args.args] == [each.name for each in arguments]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_each_device_gets_its_own_arguments(stage: StageName) -> None:
    """A host function dispatches to both, each with its own weights, pools and outputs, and with the same inputs."""
    (function,) = ast.parse(programs._host_text(stage, 2)).body
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == stage]
    assert [ast.unparse(call.keywords[0].value) for call in calls] == ["0", "1"]
    (_, program) = programs._parsed(stage)
    for device, call in enumerate(calls):
        *given, changes, arrived, number = map(ast.unparse, call.args)
        assert (changes, arrived, number) == (f"changes_{device}", f"arrived_{device}", str(device))
        for argument, value in zip(program.args.args, given, strict=True):
            inputs = {"input_ids", "seq_lens", "chunk_lens", "chunk_offsets", "block_table", "slot_mapping"}
            own = argument.arg not in inputs | {"sampled_ids_in"}
            assert value == (f"{argument.arg}_{device}" if own else argument.arg)


def test_programs_of_several_devices_pass_windows_on() -> None:
    """Every sum of the layers is exchanged: twice a layer."""
    for stage in ("prefill", "decode"):
        text, alone = programs._program_text(stage, 2), programs._program_text(stage, 1)
        assert text.count("tokens, changes, arrived, device)") == text.count("add_change(") == 2
        assert "changes" not in alone and ast.dump(ast.parse(alone)) == ast.dump(programs._parsed(stage)[0])


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
        ({"devices": 2}, ""),
        ({"devices": 4}, "2 KV heads cannot be split equally among 4 devices"),
        ({"devices": 2, "intermediate": 96}, "intermediate_size is 96, but must be a multiple of 64"),
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
    constants = programs._constants(programs._of_device(sizes(heads=3, kv_heads=1)), 48)
    assert constants["QUERY_ROWS"] == (48 + programs.ROWS) * 3
    assert constants["GROUP"] == 3
