"""The memory plan counts weights and activations as the kernels hold them."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.kernels import Matrix, PackedForm, runnable
from pypto_serving.kernels.forms import Scale, Weights
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.products import ExpertBuffers
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.parallel.topology import Rank, Topology
from tests.checkpoints import make_checkpoint
from tests.model.ranks import RankedProgram
from tests.model.sequences import load_program
from tests.needs import needs_kernels
from tests.quantised import FORMATS, quantise, quantise_deepseek

pytestmark = needs_kernels

NARROW = {"vocab_size": 33, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}
MOE = NARROW | {"moe_intermediate_size": 128, "num_experts": 3, "mlp_only_layers": []}
LATENT = {"hidden_size": 128, "moe_intermediate_size": 96, "q_lora_rank": 64, "o_lora_rank": 32}
SPLIT = {
    "qwen3": {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 4, "tie_word_embeddings": False},
    "qwen3_moe": MOE | {"vocab_size": 320, "num_experts": 4, "num_hidden_layers": 4},
    "phi3": {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 192},
    "deepseek_v4_fast": LATENT,
}
READING = ("vector", "exact", "ids", "table", "matrix", "rounded", "gate_up", "several")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints that are not quantised, by kind."""
    folder = tmp_path_factory.mktemp("plain")
    sizes = {
        "qwen3": NARROW | {"attention_bias": True},
        "qwen3_moe": MOE,
        "qwen2": NARROW,
        "mixtral": NARROW | {"num_local_experts": 3},
        "phi3": NARROW,
        "deepseek_v4_fast": LATENT,
    }

    def made(kind: str) -> Path:
        return folder / kind if (folder / kind).exists() else make_checkpoint(folder / kind, kind, **sizes[kind])

    return made


def held_bytes(found: Any) -> int:
    if isinstance(found, np.ndarray):
        return found.nbytes
    if isinstance(found, Matrix):  # a bias has been read as a vector
        own = (found.words, found.scales, found.compensation)
        return sum(array.nbytes for array in own if array is not None)
    assert isinstance(found, Iterable)
    return sum(map(held_bytes, found))


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[PackedWeights, int]:
    """Bytes of everything that programs are given from now on, by what they load it with."""
    sizes = defaultdict[PackedWeights, int](int)

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(weights: PackedWeights, *args: Any, **options: Any) -> Any:
            found = read(weights, *args, **options)
            sizes[weights] += held_bytes(found)
            return found

        return reads

    for name in READING:
        monkeypatch.setattr(PackedWeights, name, counting(getattr(PackedWeights, name)))
    return sizes


def require_planned(path: Path, monkeypatch: pytest.MonkeyPatch, head: Any = "auto") -> None:
    sizes, spec = counted(monkeypatch), load_spec(path, Serving("bfloat16", head=head))
    load_program(path, "bfloat16", 2, 64, kernels=runnable()[0], head=head)
    assert spec.packed_bytes == pytest.approx(sum(sizes.values()), rel=0.01)
    assert spec.weight_bytes == spec.packed_bytes or not spec.quantization


@pytest.mark.parametrize(
    ("format", "kind"),
    [
        *((format, "qwen3") for format in ("bf16", *FORMATS)),
        *((format, "qwen3_moe") for format in ("bf16", "int4_g128_f32", "blocks_bf16", "w8a8", "nvfp4")),
        *((format, "phi3") for format in ("bf16", "gptq", "w8a8")),
    ],
)
def test_every_format(
    plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, kind: str
) -> None:
    path = shutil.copytree(plain(kind), tmp_path / "model")
    if format != "bf16":
        quantise(path, format)
    require_planned(path, monkeypatch, head="int8" if format in ("bf16", "awq") else "auto")


@pytest.mark.parametrize("form", ["plain", "released", "base", "w8a8"])
def test_deepseek_v4(plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    path = shutil.copytree(plain("deepseek_v4_fast"), tmp_path / "model")
    if form != "plain":
        quantise_deepseek(path, form)
    require_planned(path, monkeypatch, head="int8" if form == "base" else "auto")


RANKS = {
    "qwen3": (Topology(2), Topology(pipeline=2)),
    "qwen3_moe": (Topology(2), Topology(2, expert=2), Topology(2, expert=2, data=2), Topology(2, pipeline=2)),
    "phi3": (Topology(2),),
    "deepseek_v4_fast": (Topology(2), Topology(2, expert=2, data=2), Topology(pipeline=2)),
}


@pytest.mark.parametrize(("kind", "topology"), [(kind, topology) for kind in RANKS for topology in RANKS[kind]])
def test_ranks_load_what_is_planned_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, topology: Topology
) -> None:
    """Together they read and pack the weights once, but for those that tests of the plan count twice."""
    path = make_checkpoint(tmp_path / "model", kind, **SPLIT[kind])
    parts, sizes = load_spec(path, Serving("bfloat16")).parts, counted(monkeypatch)
    assert parts is not None
    RankedProgram(path, topology)
    assert list(sizes.values()) == pytest.approx([parts.weight_bytes(rank) for rank in topology.ranks], rel=0.02)


def arrays_in(held: Any) -> Iterable[tuple[str, np.ndarray]]:
    """The arrays of an object, of its dictionaries and of the buffers of its experts, by name."""
    for name, value in vars(held).items():
        if isinstance(value, ExpertBuffers):
            yield from arrays_in(value)
        values = value.values() if isinstance(value, dict) else [value]
        yield from ((name, each) for each in values if isinstance(each, np.ndarray))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2", "mixtral", "phi3", "deepseek_v4_fast"])
def test_activations_of_a_token(plain: Callable[[str], Path], kind: str) -> None:
    """All buffers grow by the planned bytes with each token of a step but the logits, and the indexer's scratch."""
    sizes = {}
    for tokens in (512, 1024):
        (model,) = RankedProgram(plain(kind), Topology(), max_num_batched_tokens=tokens).models
        arrays = arrays_in(model._buffers)
        sizes[tokens] = sum(array.nbytes for name, array in arrays if name not in ("logits", "scores"))
    parts = load_spec(plain(kind), Serving("bfloat16")).parts
    assert parts is not None
    assert sizes[1024] - sizes[512] == 512 * parts.token.held(Rank(), 1)


def test_bytes_of_forms_are_those_of_the_library() -> None:
    whole = [PackedForm(Weights.BF16), PackedForm(Weights.INT8)]
    codes = itertools.product((Weights.INT4, Weights.E2M1), (Scale.BF16, Scale.F32, Scale.E8M0), (16, 32, 64, 128))
    fp8 = itertools.product((Weights.FP8,), (Scale.F32, Scale.SHARED), (4, 32, 100, 128))
    forms = [
        *whole,
        *(PackedForm(*each) for each in (*codes, *fp8)),
        PackedForm(Weights.INT4, Scale.F16, 64, zeros=True),
    ]
    for form, k in itertools.product(forms, (32, 96, 128, 2080)):
        wanted = 4 * (form.words(40, k) + form.own_words * Matrix.outputs(40))
        assert form.planned_bytes(Matrix.outputs(40), k) == wanted, (form, k)
