"""Conversion to int4 and MXFP4, from quantised weights, and of DeepSeek V4: what is written, and how well it rounds."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.cli import main
from pypto_serving.errors import ModelError
from pypto_serving.kernels import round_int4, runnable
from pypto_serving.model.checkpoint import Checkpoint
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import (
    INT4_LEVELS,
    Encoding,
    mxfp4,
    to_int4,
    to_int4_in_numpy,
    to_mxfp4,
    w4a16,
    w8a8,
)
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.formats.values import E2M1, E8M0, nibbles
from pypto_serving.model.registry import load_spec, read_config
from pypto_serving.types.arrays import Float32Array
from tests.checkpoints import make_checkpoint
from tests.model.conftest import MakeCheckpoint
from tests.model.converting import converted, tensors_of, values
from tests.quantised import quantise, quantise_deepseek

ENCODINGS: tuple[Encoding, ...] = (w4a16(32), w4a16(64), mxfp4())


def error(found: Float32Array, wanted: Float32Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def as_bfloat16(weights: Float32Array) -> Float32Array:
    return torch.from_numpy(weights).bfloat16().float().numpy()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "phi3"])
def test_what_is_written(checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, encoding: Encoding) -> None:
    """Linear layers are encoded; routers, embedding and output layer stay. A tied output layer stays tied."""
    source = checkpoint(kind, dtype="bfloat16", sharded=True, moe_intermediate_size=64)
    path = converted(source, tmp_path / "target", encoding)
    before, after = tensors_of(source), tensors_of(path)
    found = values(path)
    assert set(found) == {name.removesuffix(".weight") for name in before if name.endswith("_proj.weight")}
    for module, weights in found.items():
        assert error(weights, before.pop(f"{module}.weight").float().numpy()) < 0.14
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = json.loads((path / "config.json").read_text())
    assert config["tie_word_embeddings"] == (kind == "qwen3") and config["dtype"] == "bfloat16"
    section = config["quantization_config"]
    assert section["format"] == encoding.format and section["ignore"][0] == "lm_head"
    contents, spec = read_config(path).contents(), load_spec(path)
    assert all("total_size is what these tensors take" in verdict for verdict in contents.verdicts)
    assert {form.name for form in contents.forms} - {"bf16"} == {spec.quantization} == {encoding.scheme.name}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 3e4])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_rounds_as_well_as_the_best_of_many_scales(scale: float, group: int) -> None:
    """Within 3 % of a search over 400 scales of each group, and better than the largest magnitude's."""
    weights = as_bfloat16((np.random.default_rng(0).standard_t(4, (16, 256)) * scale).astype(np.float32))
    packed, scales = to_int4(weights.copy(), group)
    codes = nibbles(packed.view(np.int32))
    stored = (scales.astype(np.uint32) << 16).view(np.float32)
    groups = weights.reshape(16, -1, group)
    means = (codes.reshape(groups.shape).astype(np.float32) - 8) * stored[:, :, None]
    tops = np.abs(groups).max(2)

    def squared(level: float) -> Float32Array:
        factors = as_bfloat16((tops / level).astype(np.float32))[:, :, None]
        wrong = np.clip(np.rint(groups / factors), -8, 7) * factors - groups
        return np.asarray((wrong * wrong).sum(2))

    found = float(((means - groups) ** 2).sum())
    best = float(np.min([squared(level) for level in np.linspace(4, 16, 400)], axis=0).sum())
    assert best * 0.999 <= found < 1.06 * best
    assert found < 0.93 * float(squared(INT4_LEVELS[1]).sum())


def test_mxfp4_rounds_to_the_nearest() -> None:
    """Each code is the nearest at its scale, ties to the even code, and neither half nor twice the scale is better."""
    weights = as_bfloat16(np.random.default_rng(0).standard_t(4, (64, 64)).astype(np.float32))
    weights[0, :8] = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25)
    weights[0, 8:32] = 4.5
    packed, scales = to_mxfp4(weights.copy())
    codes = nibbles(packed.view(np.int32))
    assert codes[0, :8].tolist() == [0, 2, 2, 4, 4, 6, 6, 8] and scales[0, 0] == 127
    factors = E8M0[scales].repeat(32, axis=1)
    wrong = np.abs(E2M1[codes] * factors - weights)
    nearest = np.abs(E2M1[None, None] * factors[:, :, None] - weights[:, :, None]).min(2)
    assert np.array_equal(wrong, nearest)
    for other in (0.5, 2):
        rounded = np.abs(E2M1[None, None] * factors[:, :, None] * other - weights[:, :, None]).min(2)
        assert ((wrong**2).reshape(-1, 32).sum(1) <= (rounded**2).reshape(-1, 32).sum(1) + 1e-9).all()


@pytest.mark.parametrize("encode", [lambda rows: to_int4(rows, 32), to_mxfp4])
def test_groups_of_zeros_and_of_tiny_weights(encode: Any) -> None:
    weights = np.zeros((2, 64), np.float32)
    weights[1] = 1e-40
    packed, scales = encode(weights)
    codes = nibbles(packed.view(np.int32))
    assert codes.shape == (2, 64) and scales.shape == (2, 2)
    assert (codes[0] == codes[0, 0]).all() and codes[0, 0] in (0, 8)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("instruction_set", runnable())
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernels_round_to_int4_as_numpy_does(instruction_set: str, group: int) -> None:
    """Bit for bit, for weights of any size, groups that are no whole register, zeros and ties."""
    rng = np.random.default_rng(group)
    weights = (rng.standard_t(3, (37, 384)) * np.exp2(rng.integers(-140, 120, (37, 1)))).astype(np.float32)
    weights[3] = 0
    weights[4, ::2] = -0.0
    weights[5] = np.rint(rng.standard_normal(384) * 4) / 2
    weights[6] = as_bfloat16(weights[6])
    weights[7] = 3e38
    with np.errstate(all="ignore"):
        wanted = to_int4_in_numpy(weights.copy(), group)
    for found, expected in zip(round_int4(weights, group, INT4_LEVELS, instruction_set), wanted, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("format", ["blocks_bf16", "fp8_channel", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("encoding", [w8a8(), w4a16(32)], ids=lambda encoding: encoding.name)
def test_quantised_sources(tmp_path: Path, format: str, encoding: Encoding) -> None:
    """FP8 and 4-bit floats are converted from what they mean; the result is that of a plain checkpoint of that."""
    path = make_checkpoint(tmp_path / "source", tie_word_embeddings=False)
    plain = shutil.copytree(path, tmp_path / "plain")
    means = quantise(path, format)
    tensors = load_file(plain / "model.safetensors")
    meant = {name: means.get(name.removesuffix(".weight"), tensor.bfloat16()) for name, tensor in tensors.items()}
    save_file(meant, plain / "model.safetensors")
    found, wanted = (tensors_of(converted(source, tmp_path / source.name[::-1], encoding)) for source in (path, plain))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_scales_that_are_too_large(tmp_path: Path) -> None:
    """What weights stand for overflows; nothing but the error is said."""
    path = make_checkpoint(tmp_path / "source", num_hidden_layers=1)
    quantise(path, "blocks_f32")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[f"{name}_scale_inv"][:] = 3e38
    save_file(tensors, path / "model.safetensors")
    with warnings.catch_warnings(), pytest.raises(ModelError, match=rf"{name} has numbers that are not finite"):
        warnings.simplefilter("error")
        convert(path, tmp_path / "target", w8a8(), lambda *_: None)


def test_what_cannot_be_converted(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def refused(source: Path, encoding: Encoding) -> str:
        with pytest.raises(ModelError) as caught:
            convert(source, tmp_path / "target", encoding, lambda *_: None)
        assert not (tmp_path / "target").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    path = make_checkpoint(tmp_path / "int4")
    quantise(path, "int4_g32")
    assert "quantised already (int4 g32)" in refused(path, w8a8())
    assert "groups of 128 do not fill" in refused(checkpoint(), w4a16(128))
    assert "converted to w8a8 only, not to mxfp4" in refused(checkpoint("deepseek_v4_fast"), mxfp4())


def add_drafts(path: Path, inventory: DeepseekV4Inventory) -> None:
    """Random draft layers."""
    generator, tensors = torch.Generator().manual_seed(0), load_file(path / "model.safetensors")
    for name, tensor in inventory.drafts.items():
        values = torch.randn(tensor.shape, generator=generator)
        tensors[name] = values if tensor.role == "float" else values.bfloat16()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("form", ["released", "base", None])
def test_deepseek_v4_to_int8(tmp_path: Path, form: str | None) -> None:
    """Large matrices and experts become int8 with scales [n], latents bfloat16; all else stays bit by bit.

    The encoding of chats is in a folder of its own.
    """
    source = make_checkpoint(tmp_path / "source", "deepseek_v4_fast", "bfloat16")
    encoding = Path("encoding", "encoding_dsv4.py")
    (source / encoding).parent.mkdir()
    (source / encoding).write_text("REASONING_EFFORT_PROMPTS = {}")
    config = read_config(source).model
    add_drafts(source, DeepseekV4Inventory(config))
    plain = {name.removesuffix(".weight"): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    means = plain | (quantise_deepseek(source, form) if form else {})
    target = converted(source, tmp_path / "target", w8a8())
    inventory = DeepseekV4Inventory(read_config(target).model)
    Checkpoint.open(target).require(inventory.expected(mtp=True), lambda _: False)
    before, after = tensors_of(source), tensors_of(target)
    for name, tensor in (inventory.model | inventory.drafts).items():
        module = name.removesuffix(".weight")
        if tensor.role in ("linear", "expert"):
            weights = means[module].float()
            scales = weights.abs().amax(1) / 127
            assert torch.equal(after[f"{module}.scale"], scales)
            assert torch.equal(after[name], (weights / scales[:, None]).round().to(torch.int8))
        elif tensor.role == "latent":
            assert torch.equal(after[name], means[module].bfloat16())
        else:
            assert torch.equal(after[name], before[name])
    assert (target / encoding).read_bytes() == (source / encoding).read_bytes()
    raw = json.loads((target / "config.json").read_text())
    assert "expert_dtype" not in raw and raw["torch_dtype"] == "bfloat16"
    assert load_spec(target).quantization == "int8"


def test_the_commands(checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = str(checkpoint(dtype="bfloat16")), str(tmp_path / "target")
    assert main(["convert", source, target, "--format", "w4a16", "--group-size", "64"]) == 0
    assert "is complete" in capsys.readouterr().out
    assert main(["check", target]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"int4 g64 +21 +147456 +4.268", shown)
    assert "a token reads 140288 bytes of weights" in shown
    assert "Cannot be served" not in shown
    assert main(["check", target, "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["linear_layers"][0]["name"] == "int4 g64" and weights["token_bytes"] == 140_288
    assert main(["convert", source, str(tmp_path / "a\nb"), "--format", "mxfp4"]) == 2
    assert "must be text on one line" in capsys.readouterr().err
    for options, words in (
        (("w4a16", "--group-size", "16"), "--group-size is 16, but must be 32, 64 or 128"),
        (("mxfp4", "--group-size", "32"), "only w4a16 lets it be chosen"),
    ):
        assert main(["convert", source, str(tmp_path / "other"), "--format", *options]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "other").exists()
