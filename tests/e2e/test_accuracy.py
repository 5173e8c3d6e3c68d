"""Log-probabilities over HTTP: no further from transformers in float32 with the kernels than with torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from pypto_serving.kernels import runnable
from tests.checkpoints import make_checkpoint, random_model, with_dtype
from tests.e2e.server import Server

pytestmark = [
    pytest.mark.golden,
    pytest.mark.e2e,
    pytest.mark.skipif(not runnable(), reason="built without a C++ compiler"),
]

LENGTH, TOP, ROOM = 120, 20, 1.1
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 250, LENGTH)]

TopLogprobs = dict[int, float]


def exact_logprobs(kind: str) -> torch.Tensor:
    """Logprobs [t, vocab] of transformers in float32 on weights of bfloat16."""
    model = with_dtype(with_dtype(random_model(kind), torch.bfloat16), torch.float32)
    with torch.no_grad():
        logprobs: torch.Tensor = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return logprobs


def served_logprobs(model: Path, *options: str) -> list[TopLogprobs]:
    """The likeliest next tokens behind every prefix, as far as a token's text is a character of ASCII."""
    ids = {chr(symbol): token for token, symbol in enumerate(byte_order()) if symbol < 128}

    async def main(url: str) -> list[TopLogprobs]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            common = {"max_tokens": 1, "logprobs": TOP, "temperature": 0, "ignore_eos": True}
            bodies = [common | {"prompt": TOKENS[: n + 1]} for n in range(LENGTH)]
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            tops = [reply.json()["choices"][0]["logprobs"]["top_logprobs"][0] for reply in replies]
            return [{ids[text]: value for text, value in top.items() if text in ids} for top in tops]

    with Server(model, "--kv-memory", "64MiB", "--max-model-len", "512", "--log-level", "warning", *options) as server:
        return asyncio.run(main(server.url))


def byte_order() -> list[int]:
    """The byte of each token of `write_tokenizer`: its alphabet, sorted as text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    return plain + hidden


def mean_error(found: list[TopLogprobs], exact: torch.Tensor) -> float:
    errors = [abs(value - float(exact[n, token])) for n, top in enumerate(found) for token, value in top.items()]
    assert len(errors) > 3 * LENGTH
    return float(np.mean(errors))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_kernels_are_as_accurate_as_torch(kind: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / kind, kind, dtype="bfloat16")
    exact = exact_logprobs(kind)
    kernels = mean_error(served_logprobs(model), exact)
    torchs = mean_error(served_logprobs(model, "--kernels", "torch"), exact)
    assert kernels < ROOM * torchs < 0.1
