"""Quantised Qwen3 on the kernels for cards: matrices have the values of checkpoints, and engines their tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pypto_serving.backend.cuda.backend import CudaBackend
from pypto_serving.errors import ModelError
from pypto_serving.kernels.cuda.quantized import GatedSums
from pypto_serving.model.card_weights import CardWeights
from pypto_serving.model.decoder.cuda import CudaDecoder
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.formats.cards import CardForm, card_form
from pypto_serving.model.registry import Serving, load_spec, read_config
from tests.backend.cuda.programs import answers, config_for, shortfall, tiny_checkpoint
from tests.kernels.cuda.multiplying import product, random
from tests.quantised import FORMATS, Format, awq, gptq, quantise, quantise_parts

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 4}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 192}
PROMPTS = [np.random.default_rng(i).integers(0, 256, length).tolist() for i, length in enumerate((13, 4))]
TOPS = {CardForm.INT8: 127, CardForm.FP8: 448, CardForm.INT4: 1}
"""Rows of whole numbers with this as their largest magnitude are rounded to themselves."""


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms by columns in groups that cards take."""
    changes = {"group_size": 128}
    for name, quantised in (("gptq", gptq(128, False, 1)), ("auto_round_awq", awq(128, False))):
        section = FORMATS[name].section

        def wide(ignore: list[str], section: Any = section) -> dict[str, Any]:
            return section(ignore) | changes

        monkeypatch.setitem(FORMATS, f"{name}_g128", Format("int4 g128", wide, quantised))


def weights_of(path: Path) -> CardWeights:
    weights, config = CardWeights(path, "bfloat16", lambda *_: None), read_config(path).model
    weights.expect(DecoderInventory(config, weights.headers), 32)
    return weights


def joined(means: dict[str, Tensor], *names: str) -> Tensor:
    return torch.cat([means[f"model.layers.0.{name}"] for name in names]).double()


FOUR_BITS = ["int4_g128_f32", "int4_channel", "w4a8", "gptq_g128", "auto_round_awq_g128"]
EIGHT_BITS = ["w8a8", "fp8_block", "blocks_bf16", "blocks_e8m0", "fp8_tensor", "matrices_fp8"]


@pytest.mark.usefixtures("formats")
@pytest.mark.parametrize("format", [*FOUR_BITS, *EIGHT_BITS])
def test_matrices_have_the_values_of_the_checkpoint(tmp_path: Path, format: str) -> None:
    sizes = WIDE | {"intermediate_size": 256}
    means = quantise(path := tiny_checkpoint(tmp_path / "tiny", **sizes), format)
    weights, attention = weights_of(path), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    x = (3 * random(3, 256)).round().clamp(-8, 8)
    form = card_form(weights._schemes["model.layers.0.mlp.up_proj"])
    assert form is not None
    x[:, ::128] = TOPS[form]
    for names in (attention, ["mlp.down_proj"]):
        found = product(weights.matrix(*(f"model.layers.0.{name}" for name in names)), x)
        values = joined(means, *names)
        assert ((found.double() - x.double() @ values.T).abs() <= 2e-6 * x.double().abs() @ values.abs().T).all()
    gated = weights.gated("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    assert isinstance(gated, GatedSums)
    x /= 64
    gated.multiply(x, out := torch.empty(3, 256, dtype=torch.bfloat16), torch.empty(gated.num_sums(3)))
    gate, up = (x.double() @ joined(means, "mlp.gate_proj", "mlp.up_proj").T).chunk(2, dim=1)
    assert (out - torch.nn.functional.silu(gate) * up).abs().max() < 0.05 * out.abs().max()


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


MIXED = {".*[qkv]_proj": "fp8_block", ".*o_proj": "int4_channel", ".*(gate|up)_proj|lm_head": "w8a8"}


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("format", ["mixed", *(soak(each) for each in ("w8a8", "blocks_bf16", "int4_g128_f32"))])
def test_tokens_are_those_of_the_values_in_any_company(tmp_path: Path, format: str) -> None:
    """Or as good as the best, but for what rounded rows lose."""
    sizes = SIZES | ONE_HEAD | {"tie_word_embeddings": format != "mixed"}
    path, plain = (tiny_checkpoint(tmp_path / name, **sizes) for name in ("quantised", "plain"))
    means = quantise_parts(path, MIXED) if format == "mixed" else quantise(path, format)
    tensors = load_file(plain / "model.safetensors")
    tensors |= {f"{module}.weight": values.float() for module, values in means.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    alone = answers(path, PROMPTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, alone, strict=True):
        assert shortfall(model, prompt, output) < 0.15
    assert answers(path, PROMPTS, budget=7, together=True) == alone


def test_launches_are_listed_without_memory(tmp_path: Path) -> None:
    """To compile them ahead."""
    quantise_parts(path := tiny_checkpoint(tmp_path / "tiny", **SIZES, tie_word_embeddings=False), MIXED)
    launches = CudaBackend(config_for(path)).launches(read_config(path))
    names = {launch.kernel.__name__ for launch in launches}
    products = {"_few_rows", "_rounded_few_rows", "_int4_few_rows"}
    assert products | {"_round_to_int8", "_round_to_fp8", "_gate"} <= names


@pytest.mark.parametrize(
    ("format", "code", "message"),
    [
        ("w4a8", torch.tensor(8, dtype=torch.int8), r"o_proj\.weight has codes outside of \[-8, 7\]"),
        ("blocks_bf16", torch.tensor(-float("nan")).to(torch.float8_e4m3fn), "a weight of .*o_proj is not a number"),
    ],
    ids=["w4a8", "blocks_bf16"],
)
def test_odd_weights_are_refused(tmp_path: Path, format: str, code: Tensor, message: str) -> None:
    quantise(path := tiny_checkpoint(tmp_path / "tiny", **SIZES), format)
    tensors = load_file(file := path / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 5] = code
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        weights_of(path).matrix("model.layers.0.self_attn.o_proj")


def held_bytes(model: CudaDecoder) -> int:
    """The bytes of weights and their scales."""
    owners = [model._norm, model._embedding, model._head]
    for layer in model._layers:
        owners += vars(layer).values()
    matrices = [getattr(owner, "_matrix", owner) for owner in owners]
    tensors = {id(t): t for m in matrices for t in (m, *getattr(m, "__dict__", {}).values()) if isinstance(t, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("format", ["", "blocks_bf16", "mixed"])
def test_planned_bytes_are_held(tmp_path: Path, format: str) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", **SIZES, tie_word_embeddings=format != "mixed")
    if format:
        quantise_parts(path, MIXED) if format == "mixed" else quantise(path, format)
    model, weights = read_config(path).model, CardWeights(path, "bfloat16", lambda *_: None)
    assert held_bytes(CudaDecoder(model, weights, config_for(path))) == load_spec(path, Serving("bfloat16")).card_bytes


REFUSED = [
    ({}, "nvfp4", "of quantised weights its kernels take w8a8, fp8 128x128, and int4 in groups of 128 inputs"),
    ({}, "awq", "inputs without zero points, not int4 g64 with zero points"),
    ({}, "fp8_channel", "without zero points, not fp8 per output"),
    ({"intermediate_size": 96}, "int4_channel", "outputs in multiples of 64 and inputs in multiples of 128, and"),
    ({"num_key_value_heads": 2, "hidden_size": 160}, "fp8_block", "multiples of 128 outputs, not the 64 of .*k_proj"),
    ({}, "v8", "need .*q_proj and .*k_proj and .*v_proj to be stored alike"),
]


@pytest.mark.parametrize(("sizes", "format", "message"), REFUSED, ids=[format for _, format, _ in REFUSED])
def test_what_is_refused(tmp_path: Path, sizes: dict[str, Any], format: str, message: str) -> None:
    path = tiny_checkpoint(tmp_path / "tiny", **(SIZES | sizes))
    quantise_parts(path, {".*v_proj": "w8a8"}) if format == "v8" else quantise(path, format)
    assert re.search(message, load_spec(path, Serving("bfloat16")).no_card)
