"""Programs with quantised weights of every format: what they compute, and that it does not depend on company."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.types.config import Activations
from tests.checkpoints import make_checkpoint
from tests.model.neighbours import OUTPUT, PROMPT, TOKENS, assert_same, run_among_others
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels
from tests.quantised import FORMATS, quantise, quantise_parts

pytestmark = needs_kernels

WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "moe_intermediate_size": 128}
CODED = sorted(set(FORMATS) - {"w8a8"})
CODES_ERROR = {"qwen3": 0.0325, "qwen3_moe": 0.036}
"""Of logits, rms, relative: rounding activations to int8 per 128 inputs. The guide says 3.1 %, with experts 3.5 %."""
BF16_ERROR = {"qwen3": 0.0125, "qwen3_moe": 0.0135}
"""Rounding them to bfloat16: 1.2 %, 1.3 % with experts."""
W8A8_ERROR = {"qwen3": 0.034, "qwen3_moe": 0.041}
"""Rounding them to int8 per token: 3.3 %, 4.0 % with experts."""


def made(path: Path, format: str, kind: str = "qwen3", head: bool = False, **changes: Any) -> tuple[Path, Path]:
    """A quantised checkpoint, and one in float32 with the weights that it stands for."""
    sizes = WIDE | ({"tie_word_embeddings": False} if head else {}) | changes
    both = [make_checkpoint(path / name, kind, **sizes) for name in (format, "float32")]
    means, file = quantise(both[0], format, head=head), both[1] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{module}.weight": mean.float() for module, mean in means.items()}, file, {"format": "pt"})
    return both[0], both[1]


def logits(program: Any, tokens: Array = TOKENS[:60]) -> Array:
    sequences = Sequences(program)
    sequence = sequences.add(tokens)
    sequences.step([(sequence, len(tokens))], everywhere=True)
    return np.stack([sequence.logits[i] for i in range(len(tokens))])


def relative(found: Array, wanted: Array) -> float:
    """The median over positions, because near a tie experts change."""
    return float(np.median(np.sqrt(((found - wanted) ** 2).mean(1) / (wanted**2).mean(1))))


@pytest.mark.parametrize(
    ("format", "kind"),
    [*((format, "qwen3") for format in CODED), *((format, "qwen3_moe") for format in ("awq", "nvfp4", "blocks_e8m0"))],
)
def test_logits_are_those_of_the_values(tmp_path: Path, format: str, kind: str) -> None:
    quantised, plain = made(tmp_path, format, kind)
    wanted = logits(load_program(plain, "float32"))
    found = logits(load_program(quantised, "bfloat16", kernels=runnable()[0]))
    error, fp8 = relative(found, wanted), "fp8" in FORMATS[format].name
    assert error < (BF16_ERROR if fp8 else CODES_ERROR)[kind], error
    if not fp8:
        program = load_program(quantised, "bfloat16", kernels=runnable()[0], activations="bf16")
        assert (error := relative(logits(program), wanted)) < BF16_ERROR[kind], error


@pytest.mark.parametrize("kind", W8A8_ERROR)
def test_logits_of_int8_are_those_of_the_values(tmp_path: Path, kind: str) -> None:
    quantised, plain = made(tmp_path, "w8a8", kind)
    found = logits(load_program(quantised, "bfloat16", kernels=runnable()[0]))
    assert (error := relative(found, logits(load_program(plain, "float32")))) < W8A8_ERROR[kind], error


ONE = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
ALL_EXPERTS = {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 3, "mlp_only_layers": []}


@pytest.mark.parametrize(
    ("format", "kind", "sizes"),
    [
        ("int4_g32", "qwen3", ONE | {"hidden_size": 32, "vocab_size": 1}),
        ("int4_asym_channel", "qwen3", ONE | {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 33}),
        ("nvfp4", "qwen3_moe", ALL_EXPERTS | {"moe_intermediate_size": 32, "vocab_size": 33}),
        ("blocks_bf16", "qwen3_moe", ALL_EXPERTS | {"hidden_size": 36, "moe_intermediate_size": 48}),
        ("w8a8", "qwen3", ONE | {"hidden_size": 36, "intermediate_size": 16, "vocab_size": 33}),
    ],
)
def test_sizes_at_their_bounds(tmp_path: Path, format: str, kind: str, sizes: dict[str, Any]) -> None:
    """One of each, all experts, a group of all inputs, and sizes that fill no panel, no group and no block."""
    quantised, plain = made(tmp_path, format, kind, **sizes)
    tokens = TOKENS[:40] % sizes.get("vocab_size", 320)
    wanted = logits(load_program(plain, "float32"), tokens)
    found = logits(load_program(quantised, "bfloat16", kernels=runnable()[0]), tokens)
    assert relative(found, wanted) < (BF16_ERROR if "fp8" in FORMATS[format].name else CODES_ERROR)[kind]


def test_a_quantised_output_layer(tmp_path: Path) -> None:
    """What files hold counts, whatever lists say. It is not rounded once more."""
    quantised, plain = made(tmp_path, "blocks_f16", head=True)
    found = logits(load_program(quantised, "bfloat16", kernels=runnable()[0]))
    assert relative(found, logits(load_program(plain, "float32"))) < BF16_ERROR["qwen3"]
    with pytest.raises(
        ModelError, match="lm_head is stored as fp8 128x128, and is not rounded to int8; drop the option head"
    ):
        load_program(quantised, "bfloat16", kernels=runnable()[0], head="int8")


MIXED = {
    "qwen3": {
        r".*self_attn\.q_proj": "int4_asym_g32",
        r".*self_attn\.k_proj": "w8a8",
        r".*layers\.0\.mlp\.gate_proj": "fp8_channel",
        r".*layers\.1\.mlp\.up_proj": "mxfp4",
        r".*down_proj": "w4a8",
    },
    "qwen3_moe": {
        r".*self_attn\.[qv]_proj": "nvfp4",
        r".*experts\.[16]\.(gate|up)_proj": "int4_g32",
        r".*experts\.[23]\.gate_proj": "w8a8",
        r".*experts\.[23]\.up_proj": "fp8_channel",
        r".*experts\.[1-5]\.down_proj": "int4_g32",
    },
}
"""Forms of modules; all others are bfloat16. Biases, gates and ups, and experts differ in form."""


def mixed(path: Path, kind: str) -> tuple[Path, Path]:
    sizes = WIDE | ({} if "moe" in kind else {"attention_bias": True})
    both = [make_checkpoint(path / name, kind, **sizes) for name in ("mixed", "float32")]
    means, file = quantise_parts(both[0], MIXED[kind]), both[1] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{module}.weight": mean.float() for module, mean in means.items()}, file, {"format": "pt"})
    return both[0], both[1]


@pytest.mark.parametrize("kind", MIXED)
def test_parts_of_a_product_that_differ_in_form(tmp_path: Path, kind: str) -> None:
    quantised, plain = mixed(tmp_path, kind)
    wanted = logits(load_program(plain, "float32"))
    program, other = (
        load_program(quantised, "bfloat16", 900, threads=threads, kernels=runnable()[0]) for threads in (1, 3)
    )
    found = logits(program)
    assert (error := relative(found, wanted)) < CODES_ERROR[kind], error
    whole = alone(program)
    assert_same(alone(other), whole)
    assert_same(run_among_others(program, 36, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2), whole)


def alone(program: Any) -> dict[int, Array]:
    sequence = (sequences := Sequences(program)).add(TOKENS)
    sequences.run(sequence, [PROMPT, *[1] * OUTPUT])
    return {position: row for position, row in sequence.logits.items() if position >= PROMPT - 1}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.soak), "qwen3_moe"])
@pytest.mark.parametrize(
    ("format", "activations"), [("awq", "int8"), ("nvfp4", "int8"), ("nvfp4", "bf16"), ("blocks_f32", "int8")]
)
def test_chunks_neighbours_and_threads(tmp_path: Path, format: str, activations: Activations, kind: str) -> None:
    quantised, _ = made(tmp_path, format, kind)
    program, other = (
        load_program(quantised, "bfloat16", 900, threads=n, kernels=runnable()[0], activations=activations)
        for n in (1, 3)
    )
    wanted = alone(program)
    assert_same(alone(other), wanted)
    assert_same(run_among_others(program, 36, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2), wanted)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_what_has_no_kernel_names_the_matrix(tmp_path: Path) -> None:
    """A width that is not whole lines of codes."""
    path = make_checkpoint(tmp_path / "odd", **WIDE | {"intermediate_size": 48})
    quantise(path, "gptq_v2")
    with pytest.raises(ModelError, match=r"mlp\.down_proj: .* multiple of 32"):
        load_program(path, "bfloat16", kernels=runnable()[0])


def test_a_packed_file_knows_the_form(tmp_path: Path) -> None:
    """It is found again, and another form of the same tensors is not taken for it."""
    quantised, _ = made(tmp_path, "awq")
    folder = str(tmp_path / "packed")
    first = load_program(quantised, "bfloat16", kernels=runnable()[0], packed_cache=folder)
    wanted = logits(first)
    second = load_program(quantised, "bfloat16", kernels=runnable()[0], packed_cache=folder)
    assert np.array_equal(logits(second), wanted)
    assert json.loads((quantised / "config.json").read_text())["quantization_config"]
