"""Each rank takes the memory that `check` says: its part of the weights and of the KV cache, and a workspace."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "head_dim": 128}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
PROMPT_TOKENS, NUM_PROMPTS = 500, 20
"""Together more than fit the KV cache, so that all of it is written."""


@pytest.mark.parametrize(("option", "kernels"), [("--tp", "auto"), ("--pp", "auto"), ("--tp", "torch")])
def test_ranks_take_what_is_planned(tmp_path: Path, option: str, kernels: str) -> None:
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16", max_position_embeddings=1024, **SIZES, **HEADS)
    options = (str(model), option, "2", "--kv-memory", "256MiB", "--max-num-seqs", "16", "--kernels", kernels)
    command = [sys.executable, "-m", "pypto_serving", "check", *options, "--json"]
    memory = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["memory"]
    planned = [sum(rank[f"{part}_bytes"] for part in ("weight", "kv", "workspace")) for rank in memory["ranks"]]
    assert len(planned) == 2
    rng = random.Random(1)
    with Server(*options, "--log-level", "error") as server:
        for _ in range(NUM_PROMPTS):
            prompt = rng.choices(range(250), k=PROMPT_TOKENS)
            server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
        ranks = [server.worker(), *server.worker().children()]
        taken = [rank.memory_full_info().pss for rank in ranks if "guiding" not in "".join(rank.cmdline())]
    for size, most in zip(taken, planned, strict=True):
        assert 0.95 * most <= size <= 1.05 * most, (size, most)
