"""The checkpoints that benchmarks make, with smaller layers: complete, and counted as their bytes are read."""

from __future__ import annotations

from pathlib import Path

import make_checkpoint
import make_gptq
import numpy as np
import pytest
import random_weights
import typer

from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.formats.values import MatrixTensors, dequantised
from pypto_serving.model.registry import read_config

SMALL = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "q_lora_rank": 32, "o_lora_rank": 32}
FEW_LAYERS = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "n_routed_experts": 8}


def test_a_deepseek_v4_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_checkpoint, "DEEPSEEK_V4_1B", make_checkpoint.DEEPSEEK_V4_1B | SMALL)
    make_checkpoint.main("deepseek-v4-1b", tmp_path)
    contents = read_config(str(tmp_path)).contents()
    assert contents is not None and contents.source == "files" and contents.verdicts == ()


def test_a_draft_layer_that_is_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each visible token is followed by the one whose output row is its embedding."""
    monkeypatch.setattr(make_checkpoint, "DEEPSEEK_V4_1B", make_checkpoint.DEEPSEEK_V4_1B | SMALL | FEW_LAYERS)
    make_checkpoint.main("deepseek-v4-1b-agreeing", tmp_path)
    stored = StoredTensors(tmp_path, lambda phase, done, total: None)
    size = make_checkpoint.DEEPSEEK_V4_1B["vocab_size"] * SMALL["hidden_size"]
    names = ("embed.weight", "head.weight")
    embed, head = (stored.read(stored[name], 0, size).reshape(-1, SMALL["hidden_size"]) for name in names)
    lengths = np.linalg.norm(head, axis=1)
    visible = np.flatnonzero(lengths > lengths.max() / 4)
    follows = (embed[visible] @ head.T).argmax(axis=1)
    assert len(visible) > 50 and sorted(follows) == visible.tolist()


@pytest.mark.parametrize("format", make_checkpoint.FORMATS)
def test_a_qwen3_moe_checkpoint(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format has what its config.json says, in several files, and numbers of the size of real ones."""
    small = {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    monkeypatch.setitem(
        make_checkpoint.SHAPES, "30b-a3b", make_checkpoint.SHAPES["30b-a3b"] | small | {"vocab_size": 512}
    )
    monkeypatch.setattr(random_weights, "FILE_BYTES", 100_000)
    make_checkpoint.main("30b-a3b", tmp_path, format)
    config = read_config(str(tmp_path))
    contents = config.contents()
    assert contents is not None and contents.source == "files"
    assert contents.verdicts == ("index: its total_size is what these tensors take",)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stored = StoredTensors(tmp_path, lambda phase, done, total: None)
    inventory = DecoderInventory(config.model, stored.headers)
    module = "model.layers.1.mlp.experts.3.up_proj"
    scheme = inventory.schemes[module]
    if hasattr(scheme, "read"):
        values = dequantised(scheme.read(MatrixTensors(stored, module), 128, 128), 0, 128)
        assert values.std() == pytest.approx(128**-0.5, rel=0.3)


def test_a_tiny_moe_checkpoint(tmp_path: Path) -> None:
    make_checkpoint.main("tiny-moe", tmp_path / "made")
    contents = read_config(tmp_path / "made").contents()
    assert contents is not None and (contents.obstacle, contents.verdicts) == ("", ())
    assert contents.num_parameters == pytest.approx(8.1e6, rel=0.02)


def test_what_is_in_a_folder_is_replaced_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(make_checkpoint.SHAPES, "tiny", make_checkpoint.SHAPES["tiny"] | small)
    with monkeypatch.context() as patched:
        patched.setattr(random_weights, "FILE_BYTES", 100_000)
        make_checkpoint.main("tiny", tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(typer.BadParameter, match="is not empty; give a folder that is empty or not there yet, or --f"):
        make_checkpoint.main("tiny", tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    make_checkpoint.main("tiny", tmp_path, force=True)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    with pytest.raises(typer.BadParameter, match="is a file"):
        make_checkpoint.main("tiny", tmp_path / "config.json", force=True)


def test_formats_that_are_not_made_are_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="tiny is not made in int4, but in bf16, w8a8, w4a16, mxfp4, fp8"):
        make_checkpoint.main("tiny", tmp_path, "int4")
    with pytest.raises(typer.BadParameter, match=r"deepseek-v4-1b is not made in w8a8, but in bf16$"):
        make_checkpoint.main("deepseek-v4-1b", tmp_path, "w8a8")


def test_gptq_has_the_weights_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(make_checkpoint.SHAPES, "tiny", make_checkpoint.SHAPES["tiny"] | small)
    source, made = tmp_path / "source", tmp_path / "made"
    make_checkpoint.main("tiny", source, "w4a16", 128)
    make_gptq.main(source, made)
    values = []
    for folder in (source, made):
        config, stored = read_config(str(folder)), StoredTensors(folder, lambda phase, done, total: None)
        inventory = DecoderInventory(config.model, stored.headers)
        stored.require(inventory.expected(), inventory.ignores)
        module = "model.layers.0.mlp.down_proj"
        values.append(dequantised(inventory.schemes[module].read(MatrixTensors(stored, module), 128, 256), 0, 128))
    assert np.allclose(values[0], values[1], rtol=1e-3) and values[0].std() > 0
