"""Replicas of several ranks: answers as from one, whatever dies, and no process left behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pypto_serving.api.generation.bad_words import encode_bad_words
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.backend.ranks import Followers
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import ConfigError, EngineDeadError, ModelError
from pypto_serving.kernels import SharedMemory, runnable
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import RequestOutput
from pypto_serving.types.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.e2e.changing import CHANGES
from tests.e2e.engines import FOR_KERNELS, GREEDY, QUICK_FAULTS, Reply, answers, replies, run_engine
from tests.e2e.ranks import RankKiller, assert_ended, followers, rank_config, stop

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not runnable(), reason="built without a C++ compiler")]

NUM_STREAMS = 16
TWO = Topology(tensor=2)
TIGHT = {"kv_memory": "500KiB", "max_num_batched_tokens": 48}
"""Options with which prompts are computed in chunks, and requests are preempted."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "model", dtype="bfloat16")


def streams(model: Path, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which half begin alike; greedy and sampled, most with changed logits, all with log-probabilities."""
    rng, tokenizer = random.Random(5), Tokenizer.load(model)
    shared = rng.choices(range(250), k=140)
    prompts = [shared * (i % 2) + rng.choices(range(250), k=rng.randrange(4, 90)) for i in range(NUM_STREAMS)]
    common = {"logprobs": 3, "max_tokens": max_tokens, "ignore_eos": True}
    given = [common | {"temperature": i % 2, "seed": i} | CHANGES[i % len(CHANGES)] for i in range(NUM_STREAMS)]
    return prompts, [encode_bad_words(SamplingParams(**each), tokenizer) for each in given]


def answered(model: Path, config: EngineConfig, max_tokens: int = 24) -> tuple[list[Reply], Any]:
    """What each stream gets, twice, and the engine's statistics afterwards."""

    async def scenario(engine: AsyncEngine) -> tuple[list[Reply], Any]:
        first = await replies(engine, *streams(model, max_tokens))
        assert await replies(engine, *streams(model, max_tokens)) == first
        return first, engine.stats

    found: tuple[list[Reply], Any] = run_engine(config, scenario)
    return found


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Reply]:
    """What one rank answers."""
    return answered(model, rank_config(model, Topology()))[0]


@pytest.mark.parametrize("topology", [TWO, Topology(pipeline=2)], ids=["tp2", "pp2"])
def test_ranks_answer_as_one_does(model: Path, wanted: list[Reply], topology: Topology) -> None:
    """In chunks, with prefix hits, and preempted."""
    found, stats = answered(model, rank_config(model, topology, **TIGHT))
    assert found == wanted
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0
    assert stats.num_respawns == 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v4_fast"])
def test_ranks_with_experts(tmp_path: Path, kind: str) -> None:
    model = make_checkpoint(tmp_path / "model", kind, dtype="bfloat16", **FOR_KERNELS.get(kind, {}))
    wanted, _ = answered(model, rank_config(model, Topology()))
    assert answered(model, rank_config(model, Topology(tensor=2, pipeline=2, expert=2)))[0] == wanted


def test_blocks_on_disk_are_those_of_any_number_of_ranks(model: Path, wanted: list[Reply], tmp_path: Path) -> None:
    for writers, readers in [(Topology(), TWO), (TWO, Topology())]:
        options: Any = TIGHT | {"kv_disk": str(tmp_path / f"kv{writers.tensor}"), "kv_host_memory": "8MiB"}
        found, stats = answered(model, rank_config(model, writers, **options))
        assert found == wanted
        assert sum(tier.hit_tokens for tier in stats.tiers if tier.tier == "host") > 0
        found, stats = answered(model, rank_config(model, readers, **options))
        assert found == wanted
        assert sum(tier.hit_tokens for tier in stats.tiers if tier.tier == "disk") > 0


def survive(model: Path, topology: Topology, kills: int, max_tokens: int, points: dict[str, list[object]]) -> None:
    """Kill ranks at random; `points` are lives that end by themselves, see tests/faulty_worker.py."""
    prompts, params = streams(model, max_tokens)
    undisturbed = answered(model, rank_config(model, Topology()), max_tokens)[0]

    async def scenario(engine: AsyncEngine) -> list[Reply]:
        killer = RankKiller(engine, kills, seed=kills, planned=[int(epoch) for epoch in points])
        found = await replies(engine, prompts, params, killer)
        assert engine.stats.num_respawns == killer.killed + len(points) >= kills
        assert len(killer.killed_ranks) > 1
        assert_ended([process for process in killer.seen if process not in followers(worker_of(engine))])
        return found

    changes = {"faults": QUICK_FAULTS, "worker_module": "tests.faulty_worker", "backend_options": {"faults": points}}
    assert run_engine(rank_config(model, topology, changes), scenario) == undisturbed


def worker_of(engine: AsyncEngine) -> int:
    assert engine.ready is not None
    return engine.ready.worker_pid


def test_streams_survive_the_death_of_any_rank(model: Path) -> None:
    """Also of one that follows and loads."""
    survive(model, TWO, kills=4, max_tokens=40, points={"2": ["rank", 0], "4": ["after", 3]})


def test_a_rank_that_hangs_is_a_step_that_takes_too_long(model: Path) -> None:
    """The whole group ends, the rank that does not run as well."""

    async def scenario(engine: AsyncEngine) -> list[list[int]]:
        (hung,) = followers(worker_of(engine))

        def hang(output: RequestOutput) -> None:
            if hung.is_running() and hung.status() != psutil.STATUS_STOPPED:
                stop(hung)

        found = await answers(engine, [[5, 6, 7]], GREEDY, hang)
        assert engine.stats.num_respawns == 1
        assert_ended([hung])
        return found

    faults = msgspec.structs.replace(QUICK_FAULTS, step_timeout_s=5.0)
    assert run_engine(rank_config(model, TWO, {"faults": faults}), scenario) == run_engine(
        rank_config(model, Topology()), lambda engine: answers(engine, [[5, 6, 7]], GREEDY)
    )


def test_ranks_end_with_a_leader_that_is_killed_while_all_load(model: Path) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, TWO, {"faults": QUICK_FAULTS}))
        await engine.start()
        try:
            core = psutil.Process()
            while not (loading := [p for child in core.children(recursive=True) for p in followers(child.pid)]):
                await asyncio.sleep(0)
            leader = loading[0].parent()
            assert leader is not None
            leader.kill()
            assert_ended(loading)
            await engine.wait_ready()
            assert await answers(engine, [[5, 6, 7]])
            loading = followers(worker_of(engine))
        finally:
            await engine.stop()
        assert_ended(loading)

    asyncio.run(scenario())


def test_a_rank_that_cannot_load_says_why(model: Path, tmp_path: Path) -> None:
    config = rank_config(model, TWO)
    missing = msgspec.structs.replace(config, model=str(tmp_path / "missing"))
    with pytest.raises(ModelError, match="missing"):
        Followers(missing, SharedMemory.create()).await_ready(lambda *_: None)
    unknown = msgspec.structs.replace(config, kernels="unknown")
    with pytest.raises(ConfigError, match="no kernels for unknown"):
        Followers(unknown, SharedMemory.create()).await_ready(lambda *_: None)
    changes = {"kernels": "unknown", "faults": QUICK_FAULTS}
    with pytest.raises(EngineDeadError, match="no kernels for unknown"):
        run_engine(msgspec.structs.replace(config, **changes), answers)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v4_fast"])
@pytest.mark.parametrize("topology", [TWO, Topology(tensor=4, expert=2)], ids=["tp2", "tp4"])
def test_streams_survive_a_hundred_deaths(tmp_path: Path, kind: str, topology: Topology) -> None:
    points: dict[str, list[object]] = {}
    for epoch in range(2, 60, 6):
        points |= {str(epoch): ["rank", 0], str(epoch + 2): ["after", 2 + epoch % 7], str(epoch + 4): ["load", 0]}
    model = make_checkpoint(tmp_path / "model", kind=kind, dtype="bfloat16", **FOR_KERNELS.get(kind, {}))
    survive(model, topology, kills=100 - len(points), max_tokens=300, points=points)
