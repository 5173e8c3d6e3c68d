"""Replicas of several torch ranks: answers as from one, whatever dies, and nothing that listens to others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import psutil
import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import RequestOutput
from tests.checkpoints import make_checkpoint
from tests.e2e.engines import QUICK_FAULTS, Reply, replies, run_engine
from tests.e2e.ranks import (
    answered,
    assert_ended,
    followers,
    hits,
    loading_blocks,
    rank_config,
    stop,
    streams,
    survive,
)

pytestmark = pytest.mark.e2e

TWO = Topology(tensor=2)
STEP_TIMEOUT_S = 5.0
FEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Reply]:
    """What one rank answers."""
    return answered(model, rank_config(model, Topology(), kernels="torch"), max_tokens=FEW_TOKENS)[0][1]


def config_of(model: Path, topology: Topology = TWO, **options: object) -> EngineConfig:
    faults = msgspec.structs.replace(QUICK_FAULTS, step_timeout_s=STEP_TIMEOUT_S)
    return rank_config(model, topology, {"faults": faults}, kernels="torch", **options)


def assert_close(found: list[Reply], wanted: list[Reply]) -> None:
    for (tokens, values), (wanted_tokens, wanted_values) in zip(found, wanted, strict=True):
        assert tokens == wanted_tokens
        assert [v.logprob for v in values] == pytest.approx([v.logprob for v in wanted_values], abs=1e-4)


def group_of(engine: AsyncEngine) -> list[psutil.Process]:
    assert engine.ready is not None
    return [psutil.Process(engine.ready.worker_pid), *followers(engine.ready.worker_pid)]


@pytest.mark.soak  # tests/model/test_torch_ranks.py compares these programs
def test_ranks_answer_as_one_does(
    model: Path, wanted: list[Reply], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In chunks, preempted, from disk, and when a rank has died, as the log says."""
    tiers = {"max_num_batched_tokens": 48, "kv_memory": "2MiB", "kv_disk": str(tmp_path / "kv")}

    async def scenario(engine: AsyncEngine) -> None:
        for seed in (1, 2, 1):
            found = await replies(engine, *streams(model, seed, FEW_TOKENS))
        assert_close(found, wanted)
        stats = engine.stats
        assert stats.num_preemptions > 0 and hits(stats, "disk") > 0
        leader, follower = group_of(engine)
        listening = [
            c.laddr.ip for p in (leader, follower) for c in p.net_connections() if c.status == psutil.CONN_LISTEN
        ]
        assert len(listening) == 2 and set(listening) == {"127.0.0.1"}

        def kill(output: RequestOutput) -> None:
            if follower.is_running():
                follower.kill()

        assert_close(await replies(engine, *streams(model, 1, FEW_TOKENS), kill), wanted)
        assert engine.stats.num_respawns == 1
        assert_ended([leader, follower])
        assert "worker 1 is lost: rank 1 ended (exit code -9)" in capfd.readouterr().err

    run_engine(loading_blocks(config_of(model, **tiers)), scenario)


@pytest.mark.soak
def test_a_rank_that_hangs_is_a_step_that_takes_too_long(model: Path, wanted: list[Reply]) -> None:
    """An idle group, of which no step takes long, goes on after the longest time that a step may take."""

    async def scenario(engine: AsyncEngine) -> None:
        (_, hung) = group_of(engine)
        await asyncio.sleep(2 * STEP_TIMEOUT_S)
        assert_close(await replies(engine, *streams(model, 1, FEW_TOKENS)), wanted)
        assert engine.stats.num_respawns == 0

        def hang(output: RequestOutput) -> None:
            if hung.is_running() and hung.status() != psutil.STATUS_STOPPED:
                stop(hung)

        assert_close(await replies(engine, *streams(model, 1, FEW_TOKENS), hang), wanted)
        assert engine.stats.num_respawns == 1
        assert_ended([hung])

    run_engine(config_of(model), scenario)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "topology"),
    [("qwen3", Topology(tensor=4)), ("qwen3_moe", Topology(2, expert=2)), ("deepseek_v4_fast", Topology(4, expert=2))],
)
def test_streams_survive_many_deaths(tmp_path: Path, kind: str, topology: Topology) -> None:
    """The same bits come from any batch and chunk, before and after deaths, of ranks that load too."""
    model = make_checkpoint(tmp_path / "model", kind)
    wanted = answered(model, rank_config(model, topology, kernels="torch"))[0][1]
    assert_close(wanted, answered(model, rank_config(model, Topology(), kernels="torch"))[0][1])
    points: dict[str, list[object]] = {"2": ["rank", 0], "4": ["after", 3], "6": ["load", 0]}
    survive(model, topology, wanted, kills=8, points=points, kernels="torch")
