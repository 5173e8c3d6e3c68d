"""Damaged files are refused in one line, whatever byte is wrong; parts of a file are read together."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pypto_serving.errors import ModelError
from pypto_serving.model.gguf.container import Gguf
from tests.checkpoints import random_model
from tests.model.gguf.files import write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_model(path, "qwen3", random_model("qwen3", num_hidden_layers=1)).read_bytes()


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_mutated_files(whole: bytes, tmp_path: Path, count: int) -> None:
    """Each has some bytes changed, or is cut off; what is read then has the promised sizes."""
    rng, path = np.random.default_rng(count), tmp_path / "model.gguf"
    refused = 0
    for _ in range(count):
        content = np.frombuffer(whole, np.uint8).copy()
        for at in rng.integers(0, 12_000, rng.integers(1, 4)):
            content[at] = rng.choice([0, 1, 127, 255, rng.integers(0, 256)])
        cut = len(content) if rng.random() < 0.8 else int(rng.integers(0, len(content)))
        path.write_bytes(content[:cut].tobytes())
        try:
            model = Gguf.open(path)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            tensor = rng.choice(list(model.tensors.values()))
            rows = int(np.prod(tensor.shape[:-1]))
            assert tensor.rows(0, rows).size == np.prod(tensor.shape)
    assert refused > count // 4


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
