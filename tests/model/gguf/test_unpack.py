"""GGUF files of every architecture, unpacked and served: logits of transformers on the weights that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import Checkpoint
from pypto_serving.model.gguf.container import Gguf
from pypto_serving.model.gguf.unpack import unpack
from pypto_serving.model.registry import read_config
from tests.checkpoints import random_model
from tests.model.gguf.files import ARCHITECTURES, write_model
from tests.model.sequences import Sequences, load_program


def unpacked(path: Path) -> Path:
    return unpack(path, path.parent / "cache", lambda *_: None)


SIZES: dict[str, dict[str, Any]] = {"llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        *((kind, SIZES.get(kind, {})) for kind in ARCHITECTURES),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    ],
)
def test_logits(tmp_path: Path, kind: str, overrides: dict[str, Any]) -> None:
    """Matrices become bfloat16, so the model's are rounded first."""
    model = random_model(kind, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16().float())
    folder = unpacked(write_model(tmp_path / "model.gguf", kind, model))
    assert len(read_config(folder).contents().obstacle) == 0
    tokens = np.random.default_rng(0).integers(0, 256, 100)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)[None]).logits[0].numpy()
    sequence = (sequences := Sequences(load_program(folder, threads=1))).add(tokens)
    sequences.run(sequence, [60, 40])
    assert max(np.abs(row - wanted[at]).max() for at, row in sequence.logits.items()) < 1e-4


@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.Q5_1])
def test_weights_are_those_of_the_file(tmp_path: Path, type: Type) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"), type)
    (tensor,) = (t for name, t in Gguf.open(path).tensors.items() if name == "blk.1.ffn_down.weight")
    stored = Checkpoint.open(unpacked(path)).tensors["model.layers.1.mlp.down_proj.weight"]
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        found = torch.frombuffer(bytearray(file.read(stored.num_bytes)), dtype=torch.bfloat16).view(stored.shape)
    assert torch.equal(found, torch.from_numpy(tensor.rows(0, len(found))).bfloat16())


def test_a_folder_is_unpacked_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"))
    folder = unpacked(path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpacked(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_model(path, "qwen3", random_model("qwen3", seed=1))
    assert unpacked(path) != folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": ("clip", Value.STRING)}, "vision encoder"),
        ({"general.architecture": ("rwkv", Value.STRING)}, "llama, mistral3, qwen2"),
        ({"tokenizer.ggml.model": ("bert", Value.STRING)}, "gpt2 and llama"),
        ({"tokenizer.ggml.pre": ("elvish", Value.STRING)}, "elvish"),
        ({"qwen3.rope.dimension_count": (8, Value.UINT32)}, "rope.dimension_count"),
        ({"qwen3.attention.head_count": (0, Value.UINT32)}, "attention.head_count"),
        ({"qwen3.rope.scaling.type": ("longrope", Value.STRING)}, "longrope"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"), **changes)
    with pytest.raises(ModelError, match=words) as caught:
        unpacked(path)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("gguf/*/model"))
