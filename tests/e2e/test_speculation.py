"""Servers with and without drafts give the same answers; what they say of drafts adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

REPEATING = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3} for name in ("left", "right")},
    "required": ["left", "right"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"prompt": REPEATING, "max_tokens": 90, "ignore_eos": True}
BODIES: tuple[dict[str, Any], ...] = (
    LONG | {"temperature": 0, "logprobs": 3},
    LONG | {"temperature": 0.7, "seed": 3, "n": 3},
    LONG | {"temperature": 0, "stop": [" letters l", "44"]},
    LONG | {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.3, "repetition_penalty": 1.05, "logprobs": 0},
    {"prompt": REPEATING, "max_tokens": 60, "min_tokens": 40, "temperature": 0},
    LONG | {"temperature": 0, "stop_token_ids": [20, 21, 22], "include_stop_str_in_output": True},
    {"prompt": REPEATING, "max_tokens": 200, "temperature": 1.0, "seed": 5, "structured_outputs": {"json": SCHEMA}},
    {"prompt": "a", "max_tokens": 200, "temperature": 0, "structured_outputs": {"json": SCHEMA}, "logprobs": 1},
    LONG | {"temperature": 0, "structured_outputs": {"regex": "(ab, ab, (abc|abd), ){40}"}},
)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Without drafts, and with them."""
    options = ("--kv-memory", "64MiB", "--log-level", "warning")
    with Server(*options) as plain, Server(*options, "--spec-method", "ngram", "--spec-tokens", "6") as guessing:
        yield plain, guessing


def ask(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    with server.http as client:
        answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def shown(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What must not depend on drafts."""
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def test_answers_are_the_same(servers: tuple[Server, Server]) -> None:
    plain, guessing = servers
    alone = [shown(ask(plain, body)) for body in BODIES]
    assert [shown(ask(guessing, body)) for body in BODIES] == alone
    with ThreadPoolExecutor(len(BODIES)) as pool:
        assert list(pool.map(lambda body: shown(ask(guessing, body)), BODIES)) == alone


def test_drafts_add_up(servers: tuple[Server, Server]) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    _, guessing = servers

    def counted() -> list[float]:
        return [guessing.metric(f"vllm:spec_decode_{name}_total") for name in names]

    before = counted()
    usages = [ask(guessing, body)["usage"] for body in BODIES[:3]]
    rounds, drafted, accepted, by_position = (b - a for a, b in zip(before, counted(), strict=True))
    details = [usage["completion_tokens_details"] for usage in usages]
    told = [sum(each[f"{what}_prediction_tokens"] for each in details) for what in ("accepted", "rejected")]
    assert 0 < accepted == by_position < drafted and rounds <= drafted
    assert min(told) > 0
    assert sum(told) <= drafted, "what comes behind a stop string is not the request's any more"
    for each, usage in zip(details, usages, strict=True):
        assert each["accepted_prediction_tokens"] <= usage["completion_tokens"]


def test_bench_serve_prints_the_acceptance_length(servers: tuple[Server, Server], tmp_path: Any) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i} {REPEATING}", "output_tokens": 60}) for i in range(3)))
    command = [sys.executable, "-m", "pypto_serving", "bench", "serve", "--dataset-name", "custom", "--ignore-eos"]
    options = ["--dataset-path", str(data), "--num-prompts", "3", "--base-url", servers[1].url]
    report = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    length = next(line.split()[-1] for line in report.splitlines() if line.startswith("Acceptance length:"))
    assert 1 < float(length) <= 7
