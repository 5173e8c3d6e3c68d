"""Log-likelihoods as lm-eval asks for them over HTTP, against transformers in float32; and after worker deaths."""

from __future__ import annotations

import random
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import QUICK_FAULTS, Killer, answers, engine_config, run_engine
from tests.e2e.server import Server
from tests.thinning import some

pytestmark = [pytest.mark.golden, pytest.mark.e2e]

QUESTIONS = [
    (
        f"<|im_start|>user\nWhat is {a}{sign}{b}?<|im_end|>\n<|im_start|>assistant\n",
        f"{a} {sign} {b} = {answer}<|im_end|>",
    )
    for a, b in ((2, 2), (41, 17), (99, 98), (10, 3))
    for sign, answer in (("+", a + b), ("-", a - b), ("+", a + b + 1), ("-", a - b + 9))
]
"""Contexts and continuations: two right ones, then two wrong ones."""
KINDS = ("qwen3", "deepseek_v4_fast")
WITHIN = {"float32": 1e-4, "bfloat16": 0.5}
"""How far the log-probability of a token may be off, and ten times how far it may be in the mean: rounding alone, and
activations of bfloat16, which move unlikely tokens most."""


class Golden:
    """What lm-eval's own backend computes: the sum over a continuation's tokens, and whether each is the greedy one."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found


def loglikelihoods(server: Server, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool, list[float]]]:
    """Ask as lm-eval 0.4.13's `local-completions` does, and read the answer as it does."""
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [context + more for context, more in pairs], "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": 1, "seed": 1234, "echo": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = []
    for choice, (context, more) in zip(sorted(answer.json()["choices"], key=itemgetter("index")), pairs, strict=True):
        begin = len(context)
        values = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        assert len(values) == len(more)
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy, values))
    return found


def check(server: Server, golden: Golden, pairs: list[tuple[list[int], list[int]]], within: float) -> list[bool]:
    greedy, errors = [], []
    for (context, more), (total, is_greedy, values) in zip(pairs, loglikelihoods(server, pairs), strict=True):
        exact = golden.logprobs(context + more)[len(context) - 1 : -1]
        right = exact[torch.arange(len(more)), torch.tensor(more)]
        errors += np.abs(np.array(values) - right.numpy()).tolist()
        assert total == sum(values)
        assert is_greedy == bool((exact.argmax(-1) == torch.tensor(more)).all())
        greedy.append(is_greedy)
    print(f"errors of log-probabilities: mean {np.mean(errors):.5f}, largest {max(errors):.5f}")
    assert max(errors) < within and np.mean(errors) < within / 10
    return greedy


def test_the_bundled_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    pairs = [(tokenizer.encode(context), tokenizer.encode(more)) for context, more in QUESTIONS]
    with Server("--log-level", "warning", "--max-model-len", "256") as server:
        greedy = check(server, Golden(BUNDLED), pairs, WITHIN["bfloat16"])
    assert greedy == [True, True, False, False] * 4, "the model knows its sums"


@pytest.mark.parametrize("dtype", some(WITHIN, "bfloat16"))
def test_prompts_of_all_lengths(dtype: str, tmp_path: Path) -> None:
    """Over several steps, and from one token of context."""
    model, rng = make_checkpoint(tmp_path / "model", dtype=dtype), random.Random(5)
    lengths = [(1, 1), (1, 40), (15, 2), (16, 1), (200, 3), (100, 180)]
    pairs = [(rng.choices(range(250), k=a), rng.choices(range(250), k=b)) for a, b in lengths]
    with Server(model, "--kv-memory", "64MiB", "--max-model-len", "512", "--log-level", "warning") as server:
        check(server, Golden(model), pairs, WITHIN[dtype])


def small_model(kind: str, folder: Path) -> Path:
    changes = {"o_lora_rank": 32} if kind == "deepseek_v4_fast" else {}  # as the kernels want it
    return make_checkpoint(folder / "model", kind=kind, dtype="bfloat16", **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_says_what_each_of_its_positions_says(kind: str, tmp_path: Path) -> None:
    """What the tokens of a prompt get is what a choice gets behind the tokens before, bit by bit."""
    prompt = random.Random(4).choices(range(250), k=40)
    common = {"temperature": 0, "ignore_eos": True, "max_tokens": 1}
    prompts = [prompt, *(prompt[:end] for end in range(1, len(prompt)))]
    params = [SamplingParams(**common, prompt_logprobs=3), *[SamplingParams(**common, logprobs=3)] * (len(prompt) - 1)]
    scored, sampled = [], {}

    def take(output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            scored.append(output.prompt_logprobs)
        for each in output.logprobs or ():
            sampled[output.request_id] = (each.top_ids, each.top_logprobs)

    run_engine(engine_config(small_model(kind, tmp_path)), lambda engine: answers(engine, prompts, params, take))
    ids, values = (b"".join(getattr(part, name) for part in scored) for name in ("top_ids", "top_values"))
    wanted = [sampled[f"q{i}"] for i in range(1, len(prompt))]
    assert (ids, values) == (b"".join(pair[0] for pair in wanted), b"".join(pair[1] for pair in wanted))


@pytest.mark.parametrize("kind", some(KINDS, "deepseek_v4_fast"))
def test_they_survive_deaths_of_the_worker(kind: str, tmp_path: Path) -> None:
    """Each comes once, and with the same bits as when nothing happens."""
    model, rng = small_model(kind, tmp_path), random.Random(3)
    prompts = [rng.choices(range(250), k=rng.randrange(1, 400)) for _ in range(24)]
    params = [
        SamplingParams(max_tokens=i % 3, temperature=0, ignore_eos=True, prompt_logprobs=i % 4) for i in range(24)
    ]

    def collected(changes: dict[str, Any], kills: int) -> tuple[list[list[int]], dict[str, list[bytes]]]:
        found: dict[str, list[bytes]] = defaultdict(lambda: [b"", b"", b"", b""])

        async def scenario(engine: AsyncEngine) -> list[list[int]]:
            killer = Killer(engine, kills, seed=1, planned=[int(epoch) for epoch in points] if kills else ())

            def take(output: RequestOutput) -> None:
                if (part := output.prompt_logprobs) is not None:
                    parts = part.values, part.ranks, part.top_ids, part.top_values
                    found[output.request_id] = [a + b for a, b in zip(found[output.request_id], parts, strict=True)]
                killer(output)

            tokens = await answers(engine, prompts, params, take)
            assert engine.stats.num_respawns == (killer.killed + len(points) if kills else 0)
            return tokens

        config = engine_config(model, changes, max_num_batched_tokens=96)
        return run_engine(config, scenario), dict(found)

    points: dict[str, list[object]] = {"1": ["after", 9], "2": ["before", 20]}
    undisturbed = collected({}, 0)
    changes = {"worker_module": "tests.faulty_worker", "backend_options": {"faults": points}, "faults": QUICK_FAULTS}
    assert collected(changes, 2) == undisturbed
    sizes = {request_id: len(parts[0]) // 4 for request_id, parts in undisturbed[1].items()}
    assert sizes == {f"q{i}": len(prompt) - 1 for i, prompt in enumerate(prompts) if len(prompt) > 1}
