"""The weights that pypto-lib's DeepSeek V4 Flash programs take, tensor by tensor, of a shrunken W8A8 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.contract import of_role
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import w8a8
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.deepseek_v4.pypto.arguments import stages
from pypto_serving.model.deepseek_v4.pypto.weights import FlashWeights
from pypto_serving.model.registry import read_config
from tests.checkpoints import make_checkpoint

RANKS, TENSOR = 2, 2
CSA, HCA, HASHED = (1, 3), (2,), (0, 1)
NUMPY = {"float32": np.float32, "int8": np.int8, "int32": np.int32, "bfloat16": np.uint16}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 with a draft layer."""
    path = make_checkpoint(tmp_path_factory.mktemp("plain"), "deepseek_v4", dtype="bfloat16")
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in DeepseekV4Inventory(config_of(path)).drafts.items():
        values = torch.randn(tensor.shape, generator=generator)
        tensors[name] = values if tensor.role == "float" else values.bfloat16()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def converted(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("w8a8") / "model"
    convert(plain, path, w8a8(), lambda *_: None)
    return path


def config_of(path: Path) -> DeepseekV4Config:
    model = read_config(path).model
    assert isinstance(model, DeepseekV4Config)
    return model


def found(path: Path, rank: int) -> dict[str, Any]:
    """The weights of a rank by argument, the draft layer's too."""
    weights = FlashWeights(config_of(path), StoredTensors(path, lambda *_: None), RANKS, TENSOR)
    pairs = [*weights.of_rank(rank), *weights.of_draft_layer(rank)]
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: np.concatenate(list(pieces)) for name, pieces in pairs}


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_weight(converted: Path, rank: int) -> None:
    """All arguments of all programs that are weights, in their dtypes and shapes, with values transformed by hand."""
    model, values = config_of(converted), found(converted, rank)
    arguments = stages(model, RANKS, TENSOR)
    wanted = {each.name: each for stage in ("prefill", "decode_mtp") for each in of_role(arguments[stage], "weight")}
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert value.shape == wanted[name].resolve({"VOCAB": model.vocab_size})[1:], name
        assert value.dtype == NUMPY[wanted[name].dtype], name
    stored = load_file(next(converted.glob("*.safetensors")))
    expected = by_hand(stored, rank)
    assert values.keys() - expected.keys() == {"freqs_cos", "freqs_sin", "csa_hadamard_idx"}
    for name, tensor in expected.items():
        np.testing.assert_array_equal(values[name], bits(tensor, wanted[name].dtype), name)


def bits(tensor: torch.Tensor, dtype: str) -> Any:
    if dtype == "bfloat16":
        return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)
    return tensor.to(getattr(torch, dtype)).numpy()


def by_hand(stored: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What pypto-lib documents, with the operations of torch."""
    layers = [f"layers.{i}." for i in range(4)]
    named = of_layers(stored, layers, rank)
    csa, hca = ([layers[i] for i in kind] for kind in (CSA, HCA))
    for prefix, name, kind in (
        ("hca_cmp", "compressor", hca),
        ("csa_cmp", "compressor", csa),
        ("csa_inner", "indexer.compressor", csa),
    ):
        for short, long in (
            ("wkv", "wkv.weight"),
            ("wgate", "wgate.weight"),
            ("ape", "ape"),
            ("norm_w", "norm.weight"),
        ):
            named[f"{prefix}_{short}"] = torch.cat([stored[f"{layer}attn.{name}.{long}"] for layer in kind])
    indexer = [f"{layer}attn.indexer." for layer in csa]
    named["csa_idx_wq_b"] = torch.cat([stored[f"{each}wq_b.weight"].T for each in indexer])
    named["csa_idx_wq_b_scale"] = torch.cat([stored[f"{each}wq_b.scale"] for each in indexer])
    named["csa_weights_proj"] = torch.cat([stored[f"{each}weights_proj.weight"].T for each in indexer])
    named |= {f"hc_head_{name}": stored[f"hc_head_{name}"] for name in ("fn", "scale", "base")}
    named |= {"embed_weight": stored["embed.weight"], "final_norm_w": stored["norm.weight"]}
    named["lm_head_weight"] = stored["head.weight"].chunk(TENSOR)[rank]
    return named | draft_by_hand(stored, rank)


def draft_by_hand(stored: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    named = {f"mtp_{name}": value for name, value in of_layers(stored, ["mtp.0."], rank).items()}
    for name in ("e_proj", "h_proj"):
        named[f"mtp_{name}_w"] = stored[f"mtp.0.{name}.weight"]
        named[f"mtp_{name}_w_scale"] = stored[f"mtp.0.{name}.scale"]
        named[f"mtp_{name}_smooth"] = torch.ones(64)
    named |= {f"mtp_{name}_w": stored[f"mtp.0.{name}.weight"].float() for name in ("enorm", "hnorm")}
    named |= {f"mtp_mtp_hc_head_{name}": stored[f"mtp.0.hc_head_{name}"] for name in ("fn", "scale", "base")}
    return named | {"mtp_mtp_norm_w": stored["mtp.0.norm.weight"]}


def of_layers(stored: dict[str, torch.Tensor], layers: list[str], rank: int) -> dict[str, torch.Tensor]:
    def each(name: str) -> list[torch.Tensor]:
        return [stored[layer + name] for layer in layers]

    named = {
        "attn_norm_w": torch.cat(each("attn_norm.weight")),
        "norm_w": torch.cat(each("ffn_norm.weight")),
        "wq_a": torch.cat([w.T for w in each("attn.wq_a.weight")]),
        "wq_b": torch.cat([w.T for w in each("attn.wq_b.weight")]),
        "wq_b_scale": torch.cat(each("attn.wq_b.scale")),
        "wkv": torch.cat([w.T for w in each("attn.wkv.weight")]),
        "gamma_cq": torch.cat(each("attn.q_norm.weight")),
        "gamma_ckv": torch.cat(each("attn.kv_norm.weight")),
        "attn_sink": torch.cat(each("attn.attn_sink")),
        "wo_a": torch.cat([w.view(2, 16, -1) for w in each("attn.wo_a.weight")]),
        "wo_b": torch.cat(each("attn.wo_b.weight")),
        "wo_b_scale": torch.cat(each("attn.wo_b.scale")),
        "gate_w": torch.cat(each("ffn.gate.weight")).float(),
        "gate_bias": torch.cat([stored.get(f"{layer}ffn.gate.bias", torch.zeros(8)) for layer in layers]),
        "tid2eid": torch.cat([stored.get(f"{layer}ffn.gate.tid2eid", torch.zeros(320, 2)) for layer in layers]),
    }
    for block in ("attn", "ffn"):
        named |= {f"hc_{block}_{name}": torch.cat(each(f"hc_{block}_{name}")) for name in ("fn", "scale", "base")}
    for w in ("w1", "w2", "w3"):
        named[f"shared_{w}"] = torch.cat(each(f"ffn.shared_experts.{w}.weight"))
        named[f"shared_{w}_scale"] = torch.cat(each(f"ffn.shared_experts.{w}.scale"))
        experts = [f"{layer}ffn.experts.{e}.{w}" for layer in layers for e in range(4 * rank, 4 * rank + 4)]
        named[f"routed_{w}"] = torch.stack([stored[f"{name}.weight"] for name in experts])
        named[f"routed_{w}_scale"] = torch.stack([stored[f"{name}.scale"] for name in experts])
    return named


def test_layers_route_by_token_or_by_score(converted: Path) -> None:
    """The checkpoint has both, so zeros stand for what one of them lacks."""
    values = found(converted, 0)
    ids, bias = values["tid2eid"].reshape(4, -1), values["gate_bias"].reshape(4, -1)
    assert [layer for layer in range(4) if ids[layer].any()] == list(HASHED)
    assert [layer for layer in range(4) if bias[layer].any()] == [2, 3]


def test_rope_tables(converted: Path) -> None:
    """Plain angles first, then those extended by YaRN, as pypto-lib's own functions compute them."""
    values = found(converted, 0)
    positions, dims = np.arange(16384, dtype=np.float64)[:, None], np.arange(0, 16, 2)
    plain = 10000.0 ** (-dims / 16)
    stretched = 160000.0 ** (-dims / 16)
    low, high = (16 * np.log(65536 / (turns * 2 * np.pi)) / (2 * np.log(160000.0)) for turns in (32, 1))
    low, high = max(np.floor(low), 0), min(np.ceil(high), 15)
    kept = 1 - np.clip((np.arange(8) - low) / (high - low), 0, 1)
    stretched = stretched / 16 * (1 - kept) + stretched * kept
    for name, function in (("freqs_cos", np.cos), ("freqs_sin", np.sin)):
        table = (values[name].astype(np.uint32) << 16).view(np.float32)
        for profile, frequencies in enumerate((plain, stretched)):
            angles = function(positions * frequencies)
            assert np.abs(table[profile] - np.concatenate([angles, angles], axis=1)).max() < 6e-3


def test_hadamard(converted: Path) -> None:
    """A rotation, up to bfloat16, whose first row and column are positive; once for each CSA layer."""
    matrices = (found(converted, 0)["csa_hadamard_idx"].astype(np.uint32) << 16).view(np.float32).reshape(2, 32, 32)
    assert (matrices[0] == matrices[1]).all()
    np.testing.assert_allclose(matrices[0] @ matrices[0].T, np.eye(32), atol=5e-3)
    assert (matrices[0][0] > 0).all() and (matrices[0][:, 0] > 0).all() and (matrices[0] == matrices[0].T).all()


def test_other_checkpoints_are_refused(plain: Path) -> None:
    with pytest.raises(ModelError, match="W8A8; convert the checkpoint"):
        FlashWeights(config_of(plain), StoredTensors(plain, lambda *_: None), RANKS, TENSOR)
