"""Every topology of up to eight ranks: the bits of one rank, and its answers whatever dies."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import Topology
from tests.checkpoints import make_checkpoint
from tests.e2e.ranks import answered, rank_config, survive
from tests.model.ranks import assert_same_bits
from tests.needs import needs_kernels
from tests.quantised import quantise, quantise_deepseek

pytestmark = [pytest.mark.soak, needs_kernels]

MOST_RANKS = 8
LAYERS = {"qwen3": 8, "qwen3_moe": 8, "deepseek_v4_fast": 4}
DENSE = {"hidden_size": 128, "num_attention_heads": 8}
LATENT = {"q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 8}
SIZES = {
    "qwen3": DENSE | {"intermediate_size": 384},
    "qwen3_moe": DENSE | {"intermediate_size": 384, "moe_intermediate_size": 128},
    "deepseek_v4_fast": DENSE | LATENT | {"moe_intermediate_size": 96},
}


def topologies(kind: str, hosts: int = 1) -> Iterator[Topology]:
    """All but that of one rank."""
    sizes = itertools.product(range(1, MOST_RANKS + 1), repeat=3)
    for tensor, pipeline, expert in sizes:
        splits = tensor % expert == 0 and (expert == 1 or kind != "qwen3")
        if splits and 1 < tensor * pipeline <= MOST_RANKS and pipeline <= LAYERS[kind]:
            for data in {1, tensor} if expert > 1 and hosts == 1 else {1}:
                if hosts <= (pipeline if pipeline > 1 else tensor):
                    yield Topology(tensor, pipeline, expert, data, hosts)


def model_of(folder: Path, kind: str, weights: str = "bf16") -> Path:
    layers = {} if kind == "deepseek_v4_fast" else {"num_hidden_layers": LAYERS[kind]}
    path = make_checkpoint(folder / "model", kind, dtype="bfloat16", **SIZES[kind], **layers)
    if weights == "int8":
        quantise_deepseek(path, "w8a8") if kind == "deepseek_v4_fast" else quantise(path, "w8a8")
    return path


def least_memory(model: Path, topology: Topology, **options: Any) -> str:
    """The least memory for keys and values in which a sequence fits, so that requests are preempted."""
    for size in itertools.count(100, 100):
        with contextlib.suppress(ConfigError):
            rank_config(model, topology, kv_memory=f"{size}KiB", **options)
            break
    return f"{size}KiB"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_same_bits(tmp_path: Path, kind: str, weights: str, hosts: int) -> None:
    assert_same_bits(model_of(tmp_path, kind, weights), *topologies(kind, hosts))


@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_same_answers(tmp_path: Path, kind: str, weights: str) -> None:
    """In random chunks, from all tiers, preempted, and after the deaths of ranks."""
    rng, model = random.Random(f"{kind} {weights}"), model_of(tmp_path, kind, weights)
    wanted = answered(model, rank_config(model, Topology()))[0][1]
    for topology in rng.sample([*topologies(kind)], 4):
        options = {"max_num_batched_tokens": rng.randrange(17, 99)}
        options |= {"kv_disk": str(tmp_path / "kv"), "kv_host_memory": "8MiB"}
        options["kv_memory"] = least_memory(model, topology, **options)
        found, stats = answered(model, rank_config(model, topology, **options), seeds=(1, 2, 1))
        assert found[1] == wanted, topology
        assert stats.prefix_hits > 0 and stats.num_preemptions + sum(tier.hit_tokens for tier in stats.tiers) > 0
        survive(model, topology, wanted, 3, {"2": ["rank", 0]}, **options)
