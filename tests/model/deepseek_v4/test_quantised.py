"""DeepSeek V4 with quantised weights: what it computes from each form, and that it does not depend on company."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.checkpoint import Checkpoint
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import w8a8
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.registry import load_spec, read_config
from tests.checkpoints import make_checkpoint
from tests.model.deepseek_v4.replicas import FAST, NATIVE, Oracle, Schedule, Subject, run_schedule
from tests.model.neighbours import assert_same, random_tokens, run_among_others
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels
from tests.quantised import Quantise, fp8, quantise_deepseek

pytestmark = needs_kernels

WIDE = {"hidden_size": 128, "moe_intermediate_size": 96, "q_lora_rank": 64, "o_lora_rank": 32}
BLOCKS = fp8((128, 128), "scale", torch.float8_e8m0fnu)
MIXED: dict[str, Quantise | None] = {
    r".*\.attn\.wkv": None,
    r"layers\.1\.attn\.indexer\.wq_b": None,
    r".*\.shared_experts\.w3": None,
    r".*\.experts\.1\.w1": None,
    r".*\.experts\.[26]\.w3": BLOCKS,
    r".*\.experts\.[25]\.w2": None,
}
"""A release with matrices in other forms than their neighbours."""

ERRORS = {"base": 0.03, "released": 0.045, "mixed": 0.045, "w8a8": 0.065, "converted": 0.065}
"""Of logits, rms, relative: rounding activations to bfloat16; of experts to int8 per 128 inputs; all to int8 per token.

Torch in bfloat16 on the same values is 0.02 to 0.03 away.
"""

LENGTH, PROMPT, OUTPUT = 120, 90, 4
TOKENS = random_tokens(0, PROMPT + OUTPUT)


@dataclass(frozen=True)
class Made:
    """A quantised checkpoint, and one in bfloat16 and float32 with the weights that it stands for."""

    path: Path
    plain: Path


Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def make(form: str) -> Made:
        folder = tmp_path_factory.mktemp(form)
        if form == "converted":
            source, path = make("released"), folder / "w8a8"
            convert(source.path, path, w8a8(), lambda *_: None)
            return Made(path, meaning(source.plain, folder / "plain", int8_means(path)))
        path = make_checkpoint(folder / form, "deepseek_v4_fast", "bfloat16", **WIDE)
        plain = shutil.copytree(path, folder / "copy")
        means = quantise_deepseek(path, "released" if form == "mixed" else form, MIXED if form == "mixed" else None)
        return Made(path, meaning(plain, folder / "plain", means))

    return make


def int8_means(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(next(path.glob("*.safetensors")))
    codes = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    modules = {name.removesuffix(".weight"): tensor for name, tensor in codes.items()}
    return {module: tensor.float() * tensors[f"{module}.scale"][:, None] for module, tensor in modules.items()}


def meaning(source: Path, target: Path, means: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint of one file with other matrices, in float32."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    means = {f"{module}.weight": mean.float() for module, mean in means.items()}
    assert means and means.keys() <= tensors.keys()
    save_file(tensors | means, target / "model.safetensors", {"format": "pt"})
    return target


def load(path: Path, kernels: str | None = None, threads: int = 1, dtype: str = "bfloat16", **options: Any) -> Any:
    return load_program(
        path, dtype, num_blocks=600, max_model_len=512, threads=threads, kernels=kernels or runnable()[0], **options
    )


@pytest.fixture(scope="module")
def program(made: Make) -> Callable[..., Any]:
    return functools.cache(lambda form, threads=1: load(made(form).path, threads=threads))


def logits(program: Any, tokens: Array) -> Array:
    sequence = (sequences := Sequences(program)).add(tokens)
    sequences.step([(sequence, len(tokens))], everywhere=True)
    return np.stack([sequence.logits[i] for i in range(len(tokens))])


@pytest.fixture(scope="module")
def exact(made: Make) -> Callable[[str], list[tuple[Array, Array]]]:
    """Tokens and their logits in float32."""

    def make(form: str) -> list[tuple[Array, Array]]:
        program, tokens = load(made(form).plain, "torch", dtype="float32"), [random_tokens(i, LENGTH) for i in range(2)]
        return [(each, logits(program, each)) for each in tokens]

    return functools.cache(make)


def error(program: Any, exact: list[tuple[Array, Array]]) -> float:
    """Of the median position: near a tie, experts change."""
    errors = [((logits(program, tokens) - wanted) ** 2).mean(1) / (wanted**2).mean(1) for tokens, wanted in exact]
    return float(np.sqrt(np.median(errors)))


@pytest.mark.parametrize("form", ERRORS)
def test_logits_are_those_of_the_values(program: Callable[..., Any], exact: Callable[[str], Any], form: str) -> None:
    assert error(program(form), exact(form)) < ERRORS[form]


@pytest.mark.parametrize(("options", "most"), [({"activations": "bf16"}, 0.03), ({"head": "int8"}, 0.05)])
def test_options_of_a_release(made: Make, exact: Callable[[str], Any], options: dict[str, Any], most: float) -> None:
    """Experts multiply bfloat16 activations; the output layer is rounded."""
    assert load_spec(made("released").path).choices == ("activations", "head")
    assert error(load(made("released").path, **options), exact("released")) < most


def alone(program: Any, chunks: list[int]) -> dict[int, Array]:
    sequence = (sequences := Sequences(program)).add(TOKENS)
    sequences.run(sequence, [*chunks, *[1] * OUTPUT])
    return {position: row for position, row in sequence.logits.items() if position >= PROMPT - 1}


@pytest.mark.parametrize("form", ["base", "released", "mixed", "w8a8"])
def test_chunks_neighbours_and_threads(program: Callable[..., Any], form: str) -> None:
    wanted = alone(program(form), [PROMPT])
    assert len(wanted) == 1 + OUTPUT
    for chunks in ([1] * PROMPT, [7] * 12 + [6], [64, 26]):
        assert_same(alone(program(form), chunks), wanted)
    assert_same(alone(program(form, 3), [PROMPT]), wanted)
    chunks = [30, 1, 43, 16, *[1] * OUTPUT]
    assert_same(run_among_others(program(form), 36, chunks, 2, TOKENS, longest=400), wanted)


@pytest.mark.parametrize("form", ["released", "w8a8"])
def test_workers_die(tmp_path: Path, form: str) -> None:
    subject = Subject(**FAST, **NATIVE, output=12, steps=(7, 64, 120), requests=10, form=form)
    assert run_schedule(Oracle.make(subject, tmp_path), Schedule(3, ("host",), dies=True), tmp_path / "disk")["deaths"]


@pytest.mark.parametrize("form", ["base", "released", "w8a8"])
def test_every_tensor_is_needed(made: Make, tmp_path: Path, form: str) -> None:
    """One that is missing, or of another shape or type, is named; and so is one too many."""
    path = shutil.copytree(made(form).path, tmp_path / form)
    whole, config = load_file(path / "model.safetensors"), read_config(path).model

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, path / "model.safetensors")
        checkpoint = Checkpoint.open(path)
        inventory = DeepseekV4Inventory(config, checkpoint.tensors)
        with pytest.raises(ModelError) as caught:
            checkpoint.require(inventory.expected(), inventory.ignores)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for module in ("layers.1.attn.indexer.wq_b", "layers.0.ffn.experts.3.w2"):
        for name in (f"{module}.weight", f"{module}.scale"):
            odd = whole[name].flatten()[:1].repeat(7)
            for tensor in (None, odd, whole[name].to(torch.float64)):
                kept = {key: value for key, value in whole.items() if key != name}
                words = refused(kept if tensor is None else kept | {name: tensor})
                assert module in words, words
        assert f"{module}.scales is not part" in refused(whole | {f"{module}.scales": torch.ones(1)})


def test_a_scale_that_is_no_number_is_named(made: Make, tmp_path: Path) -> None:
    path = shutil.copytree(made("released").path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = "layers.2.ffn.experts.5.w3.scale"
    tensors[name].view(torch.uint8)[3, 1] = 0xFF
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has scales that are not finite"):
        load(path)


@pytest.mark.parametrize("form", ["base", "released", "w8a8"])
def test_what_a_token_reads(made: Make, form: str) -> None:
    """Stored bytes but the embedding, tables of ids and experts not chosen.

    What mixes and routes is float32; an int8 output has a sum beside its scale. Scales lie in whole lines.
    """
    path = made(form).path
    spec, contents = load_spec(path), read_config(path).contents()
    stored = {name: tensor.num_bytes for name, tensor in Checkpoint.open(path).tensors.items()}
    assert contents.bits_per_weight == 8 * sum(stored.values()) / contents.num_parameters_with_drafts
    stored = {name: size for name, size in stored.items() if not name.startswith("mtp.")}

    def read(name: str, size: int) -> float:
        if name == "embed.weight" or name.endswith("tid2eid"):
            return 0
        doubled = (".gate.weight", ".scale") if form == "w8a8" else ".gate.weight"
        wide = "norm" in name or name.endswith(doubled) or not name.endswith((".weight", ".scale"))
        return size * (2 if wide else 1) * (2 / 8 if ".experts." in name else 1)

    assert spec.token_bytes == pytest.approx(sum(read(*each) for each in stored.items()), rel=0.03)
    assert spec.weight_bytes == spec.packed_bytes > spec.token_bytes


def test_forms_of_a_mixed_checkpoint(made: Make) -> None:
    """Files tell which matrix is stored in which way."""
    forms = {form.name: form.matrices for form in read_config(made("mixed").path).contents().forms}
    assert forms["bf16"] == 4 + 1 + 4 + 4 + 8 and forms["mxfp4"] == 4 * (24 - 5)
