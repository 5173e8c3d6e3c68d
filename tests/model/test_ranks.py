"""Programs on several ranks compute the bits that one rank computes, in every format of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pypto_serving.parallel.topology import Topology
from tests.checkpoints import DECODERS, make_checkpoint
from tests.deepseek_v4 import HEAVY, SLIDING, SPARSE
from tests.model.conftest import MakeCheckpoint
from tests.model.ranks import assert_same_bits
from tests.needs import needs_kernels
from tests.quantised import FORMATS, quantise, quantise_deepseek, quantise_parts

pytestmark = needs_kernels

TENSOR = tuple(Topology(tensor=size) for size in (2, 4, 8))
EXPERT = tuple(Topology(tensor=size, expert=groups) for size, groups in [(2, 2), (4, 2), (4, 4)])
ROWS = (Topology(2, expert=2, data=2), Topology(4, expert=2, data=4), Topology(2, pipeline=2, expert=2, data=2))
"""Ranks that split the rows of attention; 4 are more than there are rows, so that some have none."""
STAGES = (Topology(pipeline=2), Topology(2, pipeline=3))
HOSTS = (Topology(2, hosts=2), Topology(3, hosts=2), Topology(pipeline=2, hosts=2), Topology(2, pipeline=3, hosts=2))
SMALL = {"num_hidden_layers": 2, "vocab_size": 131, "bos_token_id": 0, "eos_token_id": 2}
ODD = SMALL | {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3}
WIDE = SMALL | {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128}


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "sizes", [{"num_attention_heads": 8}, ODD, {"num_attention_heads": 1, "num_key_value_heads": 1}]
)
@pytest.mark.parametrize("tied", [True, False])
def test_dense(checkpoint: MakeCheckpoint, sizes: dict[str, Any], tied: bool) -> None:
    """Heads and columns that do not divide, and ranks without any."""
    path = checkpoint(
        "qwen3", dtype="bfloat16", **SMALL | sizes | {"tie_word_embeddings": tied, "attention_bias": tied}
    )
    assert_same_bits(path, *TENSOR, *STAGES)


def test_experts(checkpoint: MakeCheckpoint) -> None:
    assert_same_bits(
        checkpoint("qwen3_moe", dtype="bfloat16", **SMALL), *TENSOR, *EXPERT, Topology(2, pipeline=2, expert=2)
    )


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if not kind.startswith("qwen3")])
def test_every_family(checkpoint: MakeCheckpoint, kind: str) -> None:
    """Heads, columns and experts over ranks, and stages."""
    assert_same_bits(checkpoint(kind, dtype="bfloat16", **SMALL), TENSOR[1], EXPERT[0], STAGES[0], ROWS[0])


def test_rows_of_attention(checkpoint: MakeCheckpoint) -> None:
    assert_same_bits(checkpoint("qwen3_moe", dtype="bfloat16", **SMALL), *ROWS)


def test_hosts(checkpoint: MakeCheckpoint) -> None:
    """Layers split between hosts, and stages; several ranks on one of them."""
    path = checkpoint("qwen3", dtype="bfloat16", **SMALL | {"num_hidden_layers": 3, "num_attention_heads": 8})
    assert_same_bits(path, *HOSTS)
    assert_same_bits(path, HOSTS[0], kv_dtype="int8")


def test_hosts_with_experts(checkpoint: MakeCheckpoint) -> None:
    """Which rows a host computes depends on the tokens."""
    path = checkpoint("qwen3_moe", dtype="bfloat16", **SMALL)
    assert_same_bits(path, Topology(2, hosts=2), Topology(4, expert=2, hosts=2), Topology(2, expert=2, hosts=2))


@pytest.mark.parametrize("format", FORMATS)
def test_formats(tmp_path: Path, format: str) -> None:
    kind, topology = ("qwen3_moe", Topology(4, expert=2)) if len(format) % 2 else ("qwen3", Topology(4))
    path = make_checkpoint(tmp_path, kind, dtype="bfloat16", **WIDE)
    quantise(path, format)
    assert_same_bits(path, topology)


MIXED = {
    "qwen3": {r".*q_proj": "int4_asym_g32", r".*k_proj": "w8a8", r".*gate_proj": "fp8_channel", r".*down_proj": "w4a8"},
    "qwen3_moe": {
        r".*[qv]_proj": "nvfp4",
        r".*experts\.[16]\.(gate|up)_proj": "int4_g32",
        r".*experts\.[23]\.gate_proj": "w8a8",
        r".*experts\.[1-5]\.down_proj": "int4_g32",
    },
}


@pytest.mark.parametrize("kind", MIXED)
def test_parts_that_differ_in_form(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path, kind, dtype="bfloat16", **WIDE)
    quantise_parts(path, MIXED[kind])
    assert_same_bits(path, Topology(4, expert=2), activations="bf16")


@pytest.mark.parametrize("options", [{"head": "int8"}, {"kv_dtype": "int8"}])
def test_options(checkpoint: MakeCheckpoint, options: dict[str, Any]) -> None:
    assert_same_bits(checkpoint("qwen3", dtype="bfloat16", **SMALL), Topology(2), Topology(4), **options)


FAST = {"num_hidden_layers": 3, "o_lora_rank": 32, "layer_types": [SPARSE, HEAVY, SLIDING], "num_hash_layers": 1}
DEEPSEEK_V4 = {
    "few": FAST | {"vocab_size": 131, "hidden_size": 80, "q_lora_rank": 48, "o_groups": 1, "moe_intermediate_size": 48},
    "heads": FAST | {"num_attention_heads": 40, "o_groups": 4, "index_n_heads": 40, "index_head_dim": 64},
}


@pytest.mark.parametrize(
    ("sizes", "topologies"),
    [
        ("few", (Topology(2), Topology(4, expert=4), Topology(2, pipeline=2), *HOSTS)),
        ("heads", (Topology(8), EXPERT[1], Topology(4, expert=2, hosts=2))),
    ],
)
def test_deepseek_v4(checkpoint: MakeCheckpoint, sizes: str, topologies: tuple[Topology, ...]) -> None:
    path = checkpoint("deepseek_v4_fast", dtype="bfloat16", **DEEPSEEK_V4[sizes])
    assert_same_bits(path, *topologies)


def test_deepseek_v4_rows_of_attention(checkpoint: MakeCheckpoint) -> None:
    assert_same_bits(checkpoint("deepseek_v4_fast", dtype="bfloat16", **DEEPSEEK_V4["few"]), *ROWS)


def test_drafts_of_deepseek_v4(checkpoint: MakeCheckpoint) -> None:
    """Draft layers in the last stage, behind steps of the others; on two hosts, and where ranks split rows."""
    path = checkpoint("deepseek_v4_fast", dtype="bfloat16", **DEEPSEEK_V4["few"])
    assert_same_bits(path, Topology(2), *ROWS[::2], *STAGES, *HOSTS[::3], num_drafts=2)


@pytest.mark.parametrize("form", ["released", "base", "w8a8"])
def test_deepseek_v4_formats(tmp_path: Path, form: str) -> None:
    sizes = FAST | {"hidden_size": 128, "moe_intermediate_size": 96, "q_lora_rank": 64}
    path = make_checkpoint(tmp_path, "deepseek_v4_fast", "bfloat16", **sizes)
    quantise_deepseek(path, form)
    assert_same_bits(path, Topology(2, expert=2), Topology(4))
