"""Servers with and without a draft layer give the same answers, whatever happens; drafts are accepted and rejected."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.ranks import followers, make_drafting_checkpoint
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

LONGEST = 400
CHANGES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "seed": 3, "n": 2},
    {"temperature": 0.5, "seed": 1, "frequency_penalty": 0.3, "repetition_penalty": 1.05},
    {"temperature": 0, "min_tokens": 25, "stop_token_ids": [7, 8, 9]},
)
GUESSING = ("--spec-method", "mtp", "--spec-tokens", "3")


def bodies() -> list[dict[str, Any]]:
    """Prompts of which half share a beginning of two blocks, so that they resume behind it."""
    rng = random.Random(1)
    shared = rng.choices(range(250), k=70)
    prompts = [shared * (i % 2) + rng.choices(range(250), k=rng.randrange(1, 150)) for i in range(16)]
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    return [common | {"prompt": prompt} | CHANGES[i % len(CHANGES)] for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drafting_checkpoint(tmp_path_factory.mktemp("model") / "v4")


def ask(server: Server, body: dict[str, Any]) -> Any:
    with server.http as client:
        answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"]


def rank(server: Server) -> psutil.Process:
    """The rank that follows."""
    (process,) = followers(server.worker().pid)
    return process


def serve(model: Path, *options: str) -> Server:
    return Server(model, "--max-model-len", str(LONGEST), "--log-level", "warning", *options)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Any]:
    """Answers to each request alone, without drafts."""
    with serve(model, "--kv-memory", "64MiB") as server:
        return [ask(server, body) for body in bodies()]


SITUATIONS: dict[str, tuple[tuple[str, ...], Callable[[Server], None] | None]] = {
    "all at once": (("--kv-memory", "64MiB"), None),
    "short steps, little memory, tiers": (
        ("--kv-memory", "8MiB", "--kv-host-memory", "16MiB", "--max-num-batched-tokens", "24"),
        None,
    ),
    "ranks that split rows": (("--kv-memory", "64MiB", "--dp", "2", "--ep", "2"), None),
    "stages, of which the last dies": (("--kv-memory", "64MiB", "--pp", "2"), lambda server: rank(server).kill()),
    "a worker dies": (("--kv-memory", "64MiB"), lambda server: server.worker().kill()),
}


SOAKED = {"all at once", "a worker dies", "stages, of which the last dies"}
"""The others hold the first one's promise; processes that die are in test_hosts.py too."""


@pytest.mark.parametrize(
    "situation",
    [pytest.param(each, marks=[pytest.mark.soak] if each in SOAKED else []) for each in SITUATIONS],
)
def test_answers_are_the_same(model: Path, wanted: list[Any], situation: str) -> None:
    options, disturb = SITUATIONS[situation]
    with serve(model, *GUESSING, *options) as server, ThreadPoolExecutor(len(wanted)) as pool:
        for _ in range(10):  # on a busy machine drafts may seem not to pay for a while
            asked = [pool.submit(ask, server, body) for body in bodies()]
            if disturb is not None:
                asked[0].result()
                disturb(server)
            assert [each.result() for each in asked] == wanted
            assert ask(server, bodies()[0]) == wanted[0]  # alone, since many rows of so small a model have no drafts
            accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
            if 0 < accepted < server.metric("vllm:spec_decode_num_draft_tokens_total"):
                return
    raise AssertionError("no drafts were accepted, or none rejected")


def test_ranks_that_cannot_draft(model: Path) -> None:
    found = check(str(model), "--spec-method", "mtp", "--tp", "2", "--kernels", "torch")
    assert found.returncode == 2 and "mtp needs one rank in torch" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_model_without_draft_layers() -> None:
    found = check("--spec-method", "mtp")
    assert found.returncode and "has no draft layers" in found.stderr and len(found.stderr.splitlines()) == 1


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypto_serving", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
