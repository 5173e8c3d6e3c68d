"""The same request gets the same tokens and log-probabilities, bit by bit, whatever runs beside it and however."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.changing import CHANGES
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OUTPUT = 40
POSITIONS, CUT, SCORED = 70, 5, 128
"""Positions of prompt `CUT` that are asked for one by one; prompt tokens that a step scores."""
LARGE_MOE = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}

Choice = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A checkpoint of bfloat16; prompts up to `longest` tokens; KV memory for all of them, and for few."""

    model: Path
    longest: int
    ample: str
    tight: str

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Greedy and sampled requests of all lengths, most with changed logits.

        Every other one begins like the others and echoes its prompt.

        Behind them, one prompt cut after each position, for what every position of a prompt says.
        """
        rng = random.Random(11)
        shared = rng.choices(range(250), k=140)  # more than a tile of attention
        lengths = [1, 2, 15, 16, 17, self.longest] + [rng.randrange(1, self.longest - 40) for _ in range(15)]
        prompts = [(shared * (i % 2) + rng.choices(range(250), k=n))[: self.longest] for i, n in enumerate(lengths)]
        common = {"max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 5}
        changes = [{"prompt": p, "seed": i, **CHANGES[i % len(CHANGES)]} for i, p in enumerate(prompts)]
        whole = [common | {"temperature": 0.9 * (i % 3), "echo": i % 2 == 1} | each for i, each in enumerate(changes)]
        once = common | {"max_tokens": 1, "temperature": 0.0}
        return whole + [once | {"prompt": prompts[CUT][:end]} for end in range(1, POSITIONS + 1)]

    def server(self, *options: str) -> Server:
        length = str(self.longest + OUTPUT)
        common = ("--kv-memory", self.ample, "--max-model-len", length, "--log-level", "warning", *options)
        return Server(self.model, *common)


def make_case(kind: str, path: Path) -> Case:
    if kind == "0.6b":
        subprocess.run([sys.executable, BENCHMARKS / "make_checkpoint.py", kind, path], check=True, capture_output=True)
        return Case(path, 400, "2GiB", "64MiB")
    if kind == "large-moe":
        return Case(make_checkpoint(path, "qwen3_moe", dtype="bfloat16", **LARGE_MOE), 400, "512MiB", "12MiB")
    return Case(make_checkpoint(path, kind, dtype="bfloat16"), 300, "64MiB", "500KiB")


LONG = (pytest.mark.soak, pytest.mark.timeout(3600))
SOAKED = [pytest.param(kind, marks=LONG) for kind in ("qwen3", "0.6b", "large-moe")]
"""Weights of dense models are in test_formats_bit_by_bit.py too."""


@pytest.fixture(scope="module", params=["qwen3_moe", *SOAKED])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[Server]:
    with case.server("--num-threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def wanted(case: Case, server: Server) -> list[Choice]:
    """Answers to each request alone."""
    return one_by_one(case, server)


def one_by_one(case: Case, server: Server) -> list[Choice]:
    with server.http as client:
        return [choice_of(client.post("/v1/completions", json=body), body) for body in case.bodies]


def together(case: Case, server: Server, budget: int = 512, shared: int = 8) -> list[Choice]:
    """Answers to all requests at once; on average, `shared` of them took each step that was not for a prompt."""
    bodies = case.bodies

    async def main() -> list[Choice]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=server.url, timeout=1800, limits=limits) as client:
            replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return list(map(choice_of, replies, bodies))

    steps = server.metric("pypto:engine_steps_total")
    choices = asyncio.run(main())
    sizes = (min(budget, SCORED) if body.get("echo") else budget for body in bodies)
    most = sum(len(b["prompt"]) / size + 1 + b["max_tokens"] / shared for b, size in zip(bodies, sizes, strict=True))
    assert server.metric("pypto:engine_steps_total") - steps < most
    return choices


def choice_of(reply: httpx.Response, body: dict[str, Any]) -> Choice:
    reply.raise_for_status()
    choice: Choice = reply.json()["choices"][0]
    echoed = len(body["prompt"]) if body.get("echo") else 0
    values = choice["logprobs"]["token_logprobs"]
    assert choice["finish_reason"] == "length" and len(values) == echoed + body["max_tokens"]
    assert values[:1] == [None] if echoed else None not in values
    return choice


def test_log_probabilities_arrive_as_they_were_computed(wanted: list[Choice]) -> None:
    """What JSON says is exactly a float32, and it says many different ones."""
    values = [value for choice in wanted for value in choice["logprobs"]["token_logprobs"] if value is not None]
    values += [v for choice in wanted for top in choice["logprobs"]["top_logprobs"] for v in (top or {}).values()]
    assert all(float(np.float32(value)) == value <= 0 for value in values)
    assert len(set(values)) > len(values) / 3


def test_prompts_say_what_each_of_their_positions_says(wanted: list[Choice]) -> None:
    whole, cut = wanted[CUT]["logprobs"]["top_logprobs"][1 : POSITIONS + 1], wanted[-POSITIONS:]
    for scored, choice in zip(whole, cut, strict=True):
        (sampled,) = choice["logprobs"]["top_logprobs"]
        assert sampled.items() <= scored.items() and len(scored) <= len(sampled) + 1


def test_again_from_the_prefix_cache(case: Case, server: Server, wanted: list[Choice]) -> None:
    hits = server.metric("vllm:prompt_tokens_cached_total")
    assert one_by_one(case, server) == wanted
    assert server.metric("vllm:prompt_tokens_cached_total") > hits + 1000


def test_all_at_once(case: Case, server: Server, wanted: list[Choice]) -> None:
    assert together(case, server) == wanted


@pytest.mark.soak  # short steps have neither a cache, on two threads
@pytest.mark.parametrize("threads", ["2", "3"])
def test_without_a_cache_on_some_threads(case: Case, wanted: list[Choice], threads: str) -> None:
    with case.server("--num-threads", threads, "--no-prefix-caching") as server:
        assert together(case, server) == wanted
        assert server.metric("vllm:prefix_cache_hits_total") == 0


def test_in_steps_of_7_tokens(case: Case, wanted: list[Choice]) -> None:
    with case.server("--num-threads", "2", "--no-prefix-caching", "--max-num-batched-tokens", "7") as server:
        assert together(case, server, budget=7, shared=2) == wanted
        prompts = sum(len(body["prompt"]) for body in case.bodies)
        assert server.metric("pypto:engine_steps_total") > prompts / 7


def test_preempted_and_computed_again(case: Case, wanted: list[Choice]) -> None:
    with case.server("--num-threads", "2", "--kv-memory", case.tight) as server:
        assert together(case, server, shared=2) == wanted
        assert server.metric("vllm:num_preemptions_total") > 0


GUESSES = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}'


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--num-threads", "2"), marks=pytest.mark.soak),
        pytest.param(("--tp", "2"), marks=pytest.mark.soak),
        ("--pp", "2"),
        pytest.param(("--max-num-batched-tokens", "20"), marks=pytest.mark.soak),
    ],
)
def test_with_drafts(case: Case, wanted: list[Choice], options: tuple[str, ...]) -> None:
    with case.server("--speculative-config", GUESSES, "--kv-memory", case.tight, *options) as server:
        budget, shared = (20, 2) if "20" in options else (512, 1)
        for _ in range(10):  # on a busy machine drafts may seem not to pay for a while
            assert together(case, server, budget, shared) == wanted
            if accepted := server.metric("vllm:spec_decode_num_accepted_tokens_total"):
                break
        assert 0 < accepted < server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert one_by_one(case, server)[-POSITIONS:] == wanted[-POSITIONS:]
