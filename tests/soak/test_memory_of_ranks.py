"""Each rank takes the memory that `check` says: its part of the weights and of the KV cache, and a workspace."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.ranks import followers
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
WIDE |= {"num_attention_heads": 16, "num_key_value_heads": 8}
WORDS = {"vocab_size": 151_936, "hidden_size": 512, "num_attention_heads": 8}
DENSE = WORDS | {"intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("qwen3", WIDE),
    "words": ("qwen3", DENSE),
    "experts": ("qwen3_moe", DENSE | EXPERTS | {"num_experts": 32, "mlp_only_layers": []}),
    "latent": (
        "deepseek_v4_fast",
        WORDS
        | EXPERTS
        | {"n_routed_experts": 32, "q_lora_rank": 128, "o_lora_rank": 64, "head_dim": 128}
        | {"sliding_window": 128, "index_topk": 64},
    ),
}
"""Kinds and sizes of models; all but one have as many tokens as models have."""
CASES = [
    ("wide", "--tp 2"),
    ("wide", "--pp 2"),
    ("words", "--tp 2"),
    ("words", "--pp 2"),
    ("words", "--tp 4"),
    ("words", "--tp 2 --pp 2"),
    ("experts", "--tp 2 --ep 2"),
    ("experts", "--dp 2 --ep 2"),
    ("latent", "--tp 2"),
    ("latent", "--pp 2"),
    ("latent", "--tp 2 --pp 2"),
    ("latent", "--dp 2 --ep 2"),
]
PROMPT_TOKENS, NUM_PROMPTS, NUM_ROWS = 400, 64, 16
"""Together more than fit the KV cache, so that all of it is written."""


def ranks_taken(name: str, folder: Path, *options: str) -> list[tuple[float, float]]:
    """Serve, and return how much each rank takes of what is planned: without scores of prompts, and with them."""
    kind, sizes = MODELS[name]
    model = make_checkpoint(folder / "model", kind, dtype="bfloat16", max_position_embeddings=1024, **sizes)
    command = (str(model), *options, "--kv-memory", "64MiB", "--max-num-seqs", str(NUM_ROWS), "--max-model-len", "1024")
    checked = subprocess.run(
        [sys.executable, "-m", "pypto_serving", "check", *command, "--json"], check=True, stdout=subprocess.PIPE
    )
    planned = json.loads(checked.stdout)["memory"]["ranks"]
    rng = random.Random(1)
    with Server(*command, "--log-level", "error") as server, server.http as http, ThreadPoolExecutor(NUM_ROWS) as pool:

        def ask(count: int, **fields: Any) -> None:
            prompts = [rng.choices(range(250), k=PROMPT_TOKENS) for _ in range(count)]
            for reply in pool.map(
                lambda prompt: http.post("/v1/completions", json=fields | {"prompt": prompt}), prompts
            ):
                reply.raise_for_status()

        group = [server.worker(), *followers(server.worker().pid)]
        ask(NUM_PROMPTS, max_tokens=8, ignore_eos=True)
        usual = [rank.memory_full_info().pss for rank in group]
        ask(8, max_tokens=8, prompt_logprobs=1)
        scored = [rank.memory_full_info().pss for rank in group]
    found = []
    for rank, before, after in zip(planned, usual, scored, strict=True):
        size = sum(rank[f"{part}_bytes"] for part in ("weight", "kv", "workspace"))
        found.append((before / size, after / (size + rank["scoring_bytes"])))
    return found


@pytest.mark.parametrize(("name", "options"), CASES)
def test_ranks_take_what_is_planned(tmp_path: Path, name: str, options: str) -> None:
    found = ranks_taken(name, tmp_path, *options.split())
    assert len(found) > 1
    assert all(0.95 <= part <= 1.05 for rank in found for part in rank), found


@pytest.mark.parametrize("name", ["wide", "words"])
def test_ranks_of_torch_take_about_what_is_planned(tmp_path: Path, name: str) -> None:
    """What its allocator keeps depends on the order of steps."""
    found = ranks_taken(name, tmp_path, "--tp", "2", "--kernels", "torch")
    assert all(0.9 <= part <= 1.1 for rank in found for part in rank), found
