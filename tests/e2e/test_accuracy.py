"""Log-probabilities over HTTP: no further from transformers in float32 with the kernels than with torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.checkpoints import make_checkpoint, with_dtype
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [
    pytest.mark.golden,
    pytest.mark.e2e,
    needs_kernels,
]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LENGTH, TOP, ROOM = 120, 20, 1.1
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 250, LENGTH)]

TopLogprobs = dict[int, float]


def make_model(kind: str, path: Path) -> Path:
    if kind == "0.6b":
        subprocess.run([sys.executable, BENCHMARKS / "make_checkpoint.py", kind, path], check=True, capture_output=True)
        return path
    return make_checkpoint(path, kind, dtype="bfloat16")


def exact_logprobs(model: Path) -> torch.Tensor:
    """Logprobs [t, vocab] of transformers in float32 on weights of bfloat16."""
    exact = with_dtype(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), torch.float32)
    with torch.no_grad():
        logprobs: torch.Tensor = exact(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return logprobs


def ids_by_text(model: Path) -> dict[str, int]:
    """Tokens whose text is ASCII, and no other token's."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    count = Counter(texts)
    return {text: token for token, text in enumerate(texts) if text.isascii() and count[text] == 1}


def served_logprobs(model: Path, *options: str) -> list[TopLogprobs]:
    """The likeliest next tokens behind every prefix, as far as their texts tell them."""
    ids = ids_by_text(model)

    async def main(url: str) -> list[TopLogprobs]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            common = {"max_tokens": 1, "logprobs": TOP, "temperature": 0, "ignore_eos": True}
            bodies = [common | {"prompt": TOKENS[: n + 1]} for n in range(LENGTH)]
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            tops = [reply.json()["choices"][0]["logprobs"]["top_logprobs"][0] for reply in replies]
            return [{ids[text]: value for text, value in top.items() if text in ids} for top in tops]

    with Server(model, "--kv-memory", "64MiB", "--max-model-len", "512", "--log-level", "warning", *options) as server:
        return asyncio.run(main(server.url))


def mean_error(found: list[TopLogprobs], exact: torch.Tensor) -> float:
    errors = [abs(value - float(exact[n, token])) for n, top in enumerate(found) for token, value in top.items()]
    assert len(errors) > 3 * LENGTH
    return float(np.mean(errors))


@pytest.mark.soak  # tests/model compares each program with float32
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("qwen3", "0.6b"))]
)
def test_kernels_are_as_accurate_as_torch(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path / kind)
    exact = exact_logprobs(model)
    kernels = mean_error(served_logprobs(model), exact)
    torchs = mean_error(served_logprobs(model, "--kernels", "torch"), exact)
    print(f"{kind}: mean error of log-probabilities {kernels:.4f} with the kernels, {torchs:.4f} with torch")
    assert kernels < ROOM * torchs < 0.1
