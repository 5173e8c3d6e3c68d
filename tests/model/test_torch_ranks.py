"""Torch programs on several ranks: what one rank computes but for the last bits, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.parallel.topology import Topology
from tests.model.conftest import MakeCheckpoint
from tests.model.torch_ranks import AT_ONCE, CHUNKS, TorchRankedProgram, logits_of

SMALL = {"num_hidden_layers": 2, "vocab_size": 131, "bos_token_id": 0, "eos_token_id": 2}
ODD = SMALL | {"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES: list[tuple[str, dict[str, Any], tuple[Topology, ...]]] = [
    ("qwen3", SMALL | {"attention_bias": True}, (Topology(2), Topology(4))),
    ("qwen3", ODD | {"tie_word_embeddings": True}, (Topology(3), Topology(5))),
    ("qwen3_moe", SMALL, (Topology(2), Topology(2, expert=2), Topology(4, expert=2))),
    ("deepseek_v4_fast", {"vocab_size": 131}, (Topology(2), Topology(2, expert=2), Topology(4, expert=2))),
]


@pytest.mark.parametrize(("kind", "sizes", "topologies"), CASES)
def test_ranks_compute_what_one_does(
    checkpoint: MakeCheckpoint, kind: str, sizes: dict[str, Any], topologies: tuple[Topology, ...]
) -> None:
    """Heads and columns that do not divide, ranks without any, and several ranks with the same KV head."""
    path = checkpoint(kind, **sizes)
    wanted = logits_of(TorchRankedProgram(path, Topology()), CHUNKS)
    assert np.isfinite(wanted).all() and wanted.std() > 0
    for topology in topologies:
        program = TorchRankedProgram(path, topology)
        found = logits_of(program, CHUNKS)
        assert np.abs(found - wanted).max() < 1e-4, topology
        assert np.array_equal(found.argmax(1), wanted.argmax(1)), topology
        assert np.array_equal(logits_of(program, AT_ONCE), found), topology


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2", "deepseek_v4_fast"])
def test_ranks_read_the_weights_that_are_planned_for_them(checkpoint: MakeCheckpoint, kind: str) -> None:
    path = checkpoint(kind, **SMALL | {"tie_word_embeddings": False})
    parts = load_spec(path, Serving("float32")).torch_parts
    assert parts is not None
    for topology in (Topology(), Topology(2), Topology(2, expert=2)) if parts.num_experts else (Topology(2),):
        planned = [parts.weight_bytes(rank) for rank in topology.ranks]
        assert TorchRankedProgram(path, topology).weights == pytest.approx(planned, rel=0.01)
