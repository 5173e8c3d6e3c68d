"""Damaged files are refused in one line, whatever byte is wrong; parts of a file are read together."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pypto_serving.errors import ModelError
from pypto_serving.model.gguf.container import Gguf
from tests.checkpoints import random_model
from tests.model.gguf.files import write_model
from tests.needs import needs_kernels

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 260}
SMALL |= {"num_attention_heads": 1, "num_key_value_heads": 1}


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "type", "counts"),
    [
        ("qwen3", Type.Q8_0, [300]),
        *(
            pytest.param(kind, type, [3_500, 7_000], marks=pytest.mark.soak)
            for kind, type in (("qwen3", Type.Q5_1), ("qwen3_moe", Type.Q4_0), ("ministral3", Type.F16))
        ),
    ],
)
def test_mutated_files(tmp_path: Path, kind: str, type: Type, counts: list[int]) -> None:
    """Each is refused in a line that names it, or is served: no process ends, and memory stays near the file's size."""
    experts = {"moe_intermediate_size": 32, "mlp_only_layers": []} if kind == "qwen3_moe" else {}
    path = write_model(tmp_path / "model.gguf", kind, random_model(kind, **SMALL, **experts), type)
    command = [sys.executable, "-m", "tests.model.gguf.mutated", str(path)]
    ranges = [map(str, pair) for pair in itertools.pairwise([0, *counts])]
    running = [subprocess.Popen([*command, *pair], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for pair in ranges]
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err.decode()
        found = json.loads(out)
        assert min(found["refused"], found["served"]) > counts[0] // 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "little-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "pass its end"),
        (b"GGUF\3\0\0\0", "cut off"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        Gguf.open(path)


def split(folder: Path, count: int) -> list[Path]:
    """Two tensors in each of `count` parts."""
    paths = [folder / f"model-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    for index, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", 2 * count)
        for name in "ab":
            writer.add_tensor(f"{name}{index}", np.full((2, 32), index, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_parts(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    for path in paths:
        tensors = Gguf.open(path).tensors
        assert sorted(tensors) == ["a0", "a1", "a2", "b0", "b1", "b2"]
        assert np.all(tensors["b2"].rows(0, 2) == 2)
    paths[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.gguf"):
        Gguf.open(paths[0])
    (tmp_path / paths[0].name).rename(paths[1])
    with pytest.raises(ModelError, match=r"model-00001-of-00003\.gguf"):
        Gguf.open(paths[2])
