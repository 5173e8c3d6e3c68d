"""Tiers below the device, through a real server: the same answers, hits by tier in the usage, and in the metrics."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from pypto_serving.store.inspect import facts, folders_in
from tests.checkpoints import make_checkpoint
from tests.e2e.server import Server, complete
from tests.store.pool import wait_until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param((), marks=pytest.mark.soak, id="bf16"),
        pytest.param(("--kv-dtype", "int8", "--head", "int8"), id="int8"),
    ],
)
def test_a_prefix_comes_back_from_host_memory_even_after_a_worker_died(precision: tuple[str, ...]) -> None:
    rng = random.Random(1)
    prompt = rng.choices(range(32, 127), k=400)
    others = [rng.choices(range(32, 127), k=1000) for _ in range(3)]
    memory = "1.4MiB" if precision else "2.5MiB"
    options = ("--kv-memory", memory, "--max-model-len", "1200", "--kv-host-memory", "64MiB")
    with Server(*options, *precision) as server:
        first, cached = complete(server, prompt)
        assert cached == {"device": 0, "host": 0, "disk": 0, "remote": 0}
        for other in others:
            complete(server, other)
        again, cached = complete(server, prompt)
        assert again == first
        assert cached["host"] == 384 and cached["device"] == 0
        assert server.metric("pypto:kv_tier_hit_tokens_total") == 384
        server.worker().kill()
        after, cached = complete(server, prompt)
        assert after == first
        assert cached["host"] == 384
        assert server.http.post("/reset_prefix_cache").status_code == 200
        assert complete(server, prompt)[1] == {"device": 0, "host": 0, "disk": 0, "remote": 0}


def test_a_restarted_server_and_a_second_one_find_blocks_on_disk(tmp_path: Path) -> None:
    rng = random.Random(2)
    prompts = [rng.choices(range(32, 127), k=rng.randrange(100, 900)) for _ in range(4)]
    options = ("--kv-disk", tmp_path / "kv", "--kv-disk-size", "256MiB")
    with Server(*options) as server:
        first = [complete(server, prompt) for prompt in prompts]
        assert not any(cached["disk"] for _, cached in first)
    with Server(*options) as server, Server(*options) as second:
        for reader in (server, second):
            loads = 0
            for prompt, (text, _) in zip(prompts, first, strict=True):
                again, cached = complete(reader, prompt)
                assert again == text
                assert cached["disk"] in (0, (len(prompt) - 1) // 32 * 32)
                loads += cached["disk"] > 0
            too_slow = reader.metric("pypto:kv_tier_refused_fills_total")  # such a model may compute faster than a disk
            assert 0 < loads >= len(prompts) - too_slow
        assert server.metric("pypto:kv_tier_writable") == 1
        assert second.metric("pypto:kv_tier_writable") == 0
        assert complete(server, prompts[0] + [65] * 200)[0]
        assert server.http.post("/reset_prefix_cache").status_code == 200
        assert complete(server, prompts[0])[1]["disk"] == 0
    (part,) = folders_in(tmp_path / "kv")
    held = facts(part).meta
    assert held is not None and held.model.startswith("bundled, bfloat16, ")
    assert held.model.endswith(", 32 tokens/block")


def test_a_folder_deleted_under_a_server_costs_hits_and_no_answer(tmp_path: Path) -> None:
    rng = random.Random(4)
    prompt, other = rng.choices(range(32, 127), k=400), rng.choices(range(32, 127), k=400)
    with Server("--kv-disk", tmp_path / "kv") as server:
        text, _ = complete(server, prompt)
        expected, _ = complete(server, other)
        (tmp_path / "kv").rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        complete(server, prompt + other)
        wait_until(lambda: server.metric("pypto:kv_tier_writable") == 0)
        assert server.http.post("/reset_prefix_cache?tier=device").status_code == 200
        assert complete(server, prompt)[0] == text
        server.worker().kill()
        assert complete(server, other)[0] == expected
        wait_until(lambda: server.metric("pypto:kv_tier_writable") == 1)
    assert (tmp_path / "kv").is_dir()


@pytest.mark.soak  # tests/store/test_kills.py and test_restart.py kill while blocks are stored
def test_a_server_killed_while_it_stores_loses_no_answer(tmp_path: Path) -> None:
    rng = random.Random(3)
    prompt = rng.choices(range(32, 127), k=800)
    options = ("--kv-disk", tmp_path / "kv", "--kv-disk-size", "64MiB")
    with Server(*options) as server:
        text, _ = complete(server, prompt)
        server.kill()
    with Server(*options) as server:
        assert complete(server, prompt)[0] == text


def test_a_killed_deepseek_v4_goes_on_from_the_ends_of_prompts_on_disk(tmp_path: Path) -> None:
    """With the torch program, which takes longer to compute a prompt than to load it."""
    rng = random.Random(5)
    prompts = [rng.choices(range(32, 127), k=length) for length in (150, 400)]
    ends = [len(prompt) // 128 * 128 for prompt in prompts]
    model = make_checkpoint(tmp_path / "model", "deepseek_v4")
    options = (model, "--max-model-len", "1024", "--kv-memory", "64MiB", "--kv-disk", tmp_path / "kv")

    def hits(server: Server) -> list[int]:
        assert server.http.post("/reset_prefix_cache?tier=device").status_code == 200
        found = [complete(server, prompt) for prompt in prompts]
        assert [text for text, _ in found] == texts
        return [cached["disk"] for _, cached in found]

    with Server(*options) as server:
        texts = [complete(server, prompt)[0] for prompt in prompts]
        wait_until(lambda: hits(server) == ends)
        server.kill()
    with Server(*options) as server:
        assert hits(server) == ends
