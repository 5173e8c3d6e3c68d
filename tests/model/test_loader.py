"""Checkpoint files: both layouts, every kind of damage by name, and an identity that follows changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.fingerprint import checkpoint_digest, checkpoint_state
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.registry import read_config
from tests.model.conftest import MakeCheckpoint

Tensors = dict[str, torch.Tensor]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture
def copy(checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint that a test may damage."""

    def make(kind: str = "qwen3", **overrides: object) -> Path:
        return Path(shutil.copytree(checkpoint(kind, **overrides), tmp_path / "copy"))

    return make


def change(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / SINGLE_FILE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / SINGLE_FILE)


def open_checked(path: Path, dtype: str = "float32") -> TorchWeights:
    config = read_config(path).model
    weights = TorchWeights(path, dtype, lambda *_: None)
    inventory = DecoderInventory(config)
    weights.require(inventory.expected(), inventory.ignores)
    return weights


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checked(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_both_layouts_hold_the_same(checkpoint: MakeCheckpoint, kind: str) -> None:
    single, sharded = checkpoint(kind), checkpoint(kind, sharded=True)
    assert not (single / INDEX_FILE).exists()
    assert (sharded / INDEX_FILE).exists() and len(Checkpoint.open(sharded).files) > 1
    first, second = open_checked(single), open_checked(sharded)
    for name in DecoderInventory(read_config(single).model).tensors():
        assert torch.equal(first.read(name), second.read(name))


def test_reading_joins_converts_and_reports(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint()
    seen: list[tuple[str, int, int]] = []
    weights = TorchWeights(path, "bfloat16", lambda *state: seen.append(state))
    config = read_config(path).model
    inventory = DecoderInventory(config)
    weights.require(inventory.expected(), inventory.ignores)
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    joined = weights.read(*names)
    stored = load_file(path / SINGLE_FILE)
    assert torch.equal(joined, torch.cat([stored[name] for name in names]).bfloat16())
    for name in inventory.tensors():
        if name not in names:
            weights.read(name)
    assert seen[0] == ("weights", 0, seen[0][2])
    assert seen[-1] == ("weights", seen[-1][2], seen[-1][2])
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_read_tensor_does_not_need_the_file(copy: Callable[..., Path]) -> None:
    path = copy()
    tensor = open_checked(path).read(NORM)
    before = tensor.clone()
    change(path, lambda tensors: tensors[NORM].zero_())
    assert torch.equal(tensor, before)


def test_missing_tensor(copy: Callable[..., Path]) -> None:
    change(path := copy(), lambda tensors: tensors.pop(NORM))
    assert f"tensor {NORM} is missing" in refusal(path)


def test_surplus_tensors(copy: Callable[..., Path]) -> None:
    change(path := copy(), lambda tensors: tensors.update({"model.extra": torch.ones(1), "model.more": torch.ones(1)}))
    assert "model.extra and 1 more" in refusal(path)


def test_tensors_that_nothing_needs_are_ignored(copy: Callable[..., Path]) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "lm_head.weight": torch.ones(320, 64)}
    change(path := copy(), lambda tensors: tensors.update(extra))
    open_checked(path)


def test_an_untied_model_needs_its_head(copy: Callable[..., Path]) -> None:
    change(path := copy(tie_word_embeddings=False), lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight is missing" in refusal(path)


def test_wrong_shape(copy: Callable[..., Path]) -> None:
    change(path := copy(), lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:-1]}))
    message = refusal(path)
    assert EMBEDDING in message and "[319, 64]" in message and "[320, 64]" in message and SINGLE_FILE in message


def test_wrong_dtype(copy: Callable[..., Path]) -> None:
    change(path := copy(), lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)}))
    message = refusal(path)
    assert NORM in message and "I8" in message and "BF16" in message


def test_truncated_file(copy: Callable[..., Path]) -> None:
    file = (path := copy()) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-4])
    message = refusal(path)
    assert "truncated" in message and SINGLE_FILE in message and "tensor model." in message


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (5).to_bytes(8, "little") + b"{]{]{"])
def test_a_file_that_is_no_safetensors(copy: Callable[..., Path], content: bytes) -> None:
    (path := copy()).joinpath(SINGLE_FILE).write_bytes(content)
    assert SINGLE_FILE in refusal(path)


@pytest.mark.parametrize("entry", [{}, {"dtype": "F32", "shape": [64], "data_offsets": [0, 8]}, {"shape": 3}])
def test_a_damaged_header_entry(copy: Callable[..., Path], entry: dict[str, object]) -> None:
    header = json.dumps({NORM: entry}).encode()
    (path := copy()).joinpath(SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    assert NORM in refusal(path)


@pytest.mark.parametrize(
    ("begins", "size", "words"),
    [
        ((0, 7), 16, "the tensors a and b share bytes"),
        ((0, 9), 17, "bytes 144 to 144 belong to no tensor"),
        ((1, 9), 17, "bytes 136 to 136 belong to no tensor"),
        ((8, 0), 20, "bytes 152 to 155 belong to no tensor"),
    ],
)
def test_bytes_of_two_tensors_or_of_none(
    copy: Callable[..., Path], begins: tuple[int, ...], size: int, words: str
) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [begin, begin + 8]}
        for name, begin in zip("ab", begins, strict=True)
    }
    header = json.dumps(entries).encode().ljust(128)
    (path := copy()).joinpath(SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    assert words in refusal(path)


def test_missing_files(copy: Callable[..., Path]) -> None:
    (path := copy()).joinpath(SINGLE_FILE).unlink()
    assert f"has no {SINGLE_FILE}" in refusal(path)


def test_missing_shard_and_empty_index(copy: Callable[..., Path]) -> None:
    path = copy(sharded=True)
    shard = Checkpoint.open(path).files[1]
    shard.unlink()
    assert f"has no {shard.name}" in refusal(path)
    (path / INDEX_FILE).write_text("{}")
    assert "weight_map is missing" in refusal(path)
    (path / INDEX_FILE).write_text('{"weight_map": {"a": 4}}')
    assert "weight_map has 4 for 'a'" in refusal(path)


def test_a_tensor_in_two_files(copy: Callable[..., Path]) -> None:
    path = copy(sharded=True)
    first, second = Checkpoint.open(path).files[:2]
    tensors = load_file(second)
    save_file(tensors | load_file(first), second)
    assert "two files" in refusal(path)


def digest(path: Path) -> bytes:
    return checkpoint_digest(path, "", lambda *_: None)


@pytest.mark.parametrize("identity", [digest, checkpoint_state])
def test_the_identity_follows_weights_and_config(copy: Callable[..., Path], identity: Callable[[Path], bytes]) -> None:
    path = copy()
    seen = {identity(path)}
    assert identity(path) in seen and len(identity(path)) == 16
    change(path, lambda tensors: tensors[EMBEDDING].add_(1))
    seen.add(identity(path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    seen.add(identity(path))
    change(path, lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    seen.add(identity(path))
    assert len(seen) == 4


def test_a_copy_has_the_same_digest_and_another_state(checkpoint: MakeCheckpoint, copy: Callable[..., Path]) -> None:
    original, path = checkpoint(), copy()
    assert digest(path) == digest(original)
    assert checkpoint_state(path) != checkpoint_state(original)
