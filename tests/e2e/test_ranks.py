"""Replicas of several ranks: answers as from one, whatever dies, and no process left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import psutil
import pytest

from pypto_serving.backend.ranks.rank_process import run_rank
from pypto_serving.backend.ranks.supervisor import RankSupervisor
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.engine.worker_process import RANK_PATIENCE_S
from pypto_serving.errors import ModelError
from pypto_serving.kernels import SharedMemory
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.kv import CompressedSpec, FullSpec
from pypto_serving.types.request import RequestOutput
from tests.checkpoints import DECODERS, make_checkpoint
from tests.configs import change_config
from tests.e2e.engines import FOR_KERNELS, QUICK_FAULTS, Reply, answers, replies, run_engine
from tests.e2e.ranks import (
    MAX_TOKENS,
    MTP,
    NGRAM,
    TIGHT,
    announced,
    answered,
    assert_ended,
    followers,
    hits,
    is_stopped,
    make_drafting_checkpoint,
    rank_config,
    stop,
    streams,
    survive,
    worker_of,
)
from tests.needs import needs_kernels

pytestmark = [pytest.mark.e2e, needs_kernels]

EXPERTS = ("qwen3_moe", "deepseek_v4_fast")
SMALL_KV = {"qwen3_moe": "500KiB", "deepseek_v4_fast": "410KiB"}
TWO = Topology(tensor=2)
ROWS = Topology(tensor=2, expert=2, data=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "model", dtype="bfloat16")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Reply]:
    """What one rank answers; its blocks are then on disk, beside the model."""
    return answered(model, rank_config(model, Topology(), kv_disk=str(model.parent / "kv")))[0][1]


def test_ranks_answer_as_one_does(model: Path, wanted: list[Reply]) -> None:
    """In chunks, preempted, and from all tiers; blocks on disk are those of any number of ranks."""
    tiers = TIGHT | {"kv_disk": str(model.parent / "kv"), "kv_host_memory": "8MiB"}
    found, stats = answered(model, rank_config(model, TWO, **tiers), seeds=(1, 2, 1))
    assert found[1] == wanted
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_respawns == 0
    assert hits(stats, "host") > 0 and hits(stats, "disk") > 0
    again, stats = answered(model, rank_config(model, Topology(), **tiers), seeds=(2,))
    assert again[2] == found[2]
    assert hits(stats, "disk") > 0


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if not kind.startswith("qwen3")])
def test_every_family(tmp_path: Path, kind: str) -> None:
    """Drafts, preemptions, chunks, prefix hits, two ranks and a killed one change no answer."""
    model = make_checkpoint(tmp_path / "model", kind, "bfloat16")
    wanted, _ = answered(model, rank_config(model, Topology(), prefix_caching=False))
    changes = {"faults": QUICK_FAULTS, "backend_options": {"faults": {"1": ["after", 12]}}}
    found, stats = answered(model, rank_config(model, TWO, changes, **TIGHT, **NGRAM))
    assert found == wanted
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_respawns == 1


def test_loading_ends_once(model: Path) -> None:
    """As progress says: that of the slowest rank."""
    told: list[tuple[str, int, int]] = []

    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, Topology(tensor=3)), lambda *progress: told.append(progress))
        await engine.start()
        await engine.wait_ready()
        await engine.stop()

    asyncio.run(scenario())
    assert [done < total for _, done, total in told] == [True] * (len(told) - 1) + [False]
    assert {phase for phase, _, _ in told} == {"weights"}


def test_stages_answer_as_one_does(model: Path, wanted: list[Reply]) -> None:
    """In chunks, preempted, and from all tiers."""
    tiers = TIGHT | {"kv_disk": str(model.parent / "kv"), "kv_host_memory": "8MiB"}
    config = rank_config(model, Topology(pipeline=2), **tiers)
    assert config.limits.held_steps == 2
    found, stats = answered(model, config, seeds=(1, 1))
    assert found[1] == wanted
    assert stats.num_preemptions > 0 and stats.max_step_rows > 1 and stats.prefix_hits > 0
    assert hits(stats, "host") > 0 and hits(stats, "disk") > 0


@pytest.mark.soak  # test_draft_layer.py has such ranks, too
@pytest.mark.parametrize("kind", [pytest.param("qwen3_moe", marks=pytest.mark.soak), "deepseek_v4_fast"])
def test_ranks_that_share_rows_answer_as_one_does(tmp_path: Path, kind: str) -> None:
    """In chunks, preempted, from all tiers, and after the deaths of ranks; KV events tell of the same blocks."""
    model = make_checkpoint(tmp_path / "model", kind, dtype="bfloat16", **FOR_KERNELS.get(kind, {}))
    tiers = {"kv_disk": str(tmp_path / "kv"), "max_num_batched_tokens": 48, "kv_events": "tcp://127.0.0.1:0"}
    told: list[dict[int, set[int]]] = []
    wanted, _ = answered(model, rank_config(model, Topology(), **tiers), then=lambda e: told.append(announced(e)))
    config = rank_config(model, ROWS, **tiers, kv_memory=SMALL_KV[kind], kv_host_memory="8MiB")
    assert config.parallel.topology == ROWS
    found, stats = answered(model, config, seeds=(1, 2, 1), then=lambda e: told.append(announced(e)))
    assert found[1] == wanted[1]
    whole = [index for index, group in enumerate(config.cache.groups) if isinstance(group, (FullSpec, CompressedSpec))]
    assert whole and all(told[0][group] and told[0][group] <= told[1][group] for group in whole)
    assert stats.prefix_hits > 0 and hits(stats, "host") + hits(stats, "disk") > 0 and stats.num_respawns == 0
    assert stats.num_preemptions > 0 or kind == "deepseek_v4_fast"  # which had room for every answer
    survive(model, ROWS, wanted[1], kills=3, points={"2": ["rank", 0]})


@pytest.mark.soak
@pytest.mark.parametrize("kind", EXPERTS)
def test_ranks_with_experts(tmp_path: Path, kind: str) -> None:
    model = make_checkpoint(tmp_path / "model", kind, dtype="bfloat16", **FOR_KERNELS.get(kind, {}))
    wanted, _ = answered(model, rank_config(model, Topology()))
    assert answered(model, rank_config(model, Topology(tensor=2, pipeline=2, expert=2)))[0] == wanted


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(TWO, id="tp"),
        pytest.param(Topology(pipeline=2), marks=pytest.mark.soak, id="pp"),  # on two hosts in test_hosts.py
    ],
)
def test_streams_survive_the_death_of_any_rank(model: Path, wanted: list[Reply], topology: Topology) -> None:
    """Also of one that follows and loads."""
    survive(model, topology, wanted, kills=3, points={"2": ["rank", 0], "4": ["after", 3]})


@pytest.mark.soak
@pytest.mark.parametrize("topology", [TWO, ROWS, Topology(pipeline=2)], ids=["tp", "rows", "pp"])
def test_streams_survive_the_death_of_any_rank_that_drafts(tmp_path: Path, topology: Topology) -> None:
    model = make_drafting_checkpoint(tmp_path / "model")
    wanted = answered(model, rank_config(model, Topology()))[0][1]
    for drafting in (MTP, NGRAM):
        survive(model, topology, wanted, kills=3, points={}, max_num_seqs=3, **drafting)


def test_a_rank_that_hangs_is_a_step_that_takes_too_long(model: Path, wanted: list[Reply]) -> None:
    """The whole group ends, the rank that does not run as well."""

    async def scenario(engine: AsyncEngine) -> list[Reply]:
        (hung,) = followers(worker_of(engine))

        def hang(output: RequestOutput) -> None:
            if hung.is_running() and hung.status() != psutil.STATUS_STOPPED:
                stop(hung)

        found = await replies(engine, *streams(model, 1, MAX_TOKENS), hang)
        assert engine.stats.num_respawns == 1
        assert_ended([hung])
        return found

    faults = msgspec.structs.replace(QUICK_FAULTS, step_timeout_s=5.0)
    assert run_engine(rank_config(model, TWO, {"faults": faults}), scenario) == wanted


def test_a_rank_that_is_stopped_while_it_starts(model: Path) -> None:
    """It ends with the leader, and the next group does not wait for it."""

    async def scenario() -> None:
        faults = msgspec.structs.replace(QUICK_FAULTS, load_timeout_s=8.0)
        options = {"faults": {"1": ["stop", 0]}}
        changes = {"faults": faults, "worker_module": "tests.faulty_worker", "backend_options": options}
        engine = AsyncEngine(rank_config(model, TWO, changes))
        await engine.start()
        try:
            starting: list[psutil.Process] = []
            while not starting:
                await asyncio.sleep(0.01)
                starting = [process for process in psutil.Process().children(recursive=True) if is_stopped(process)]
            await asyncio.wait_for(engine.wait_ready(), RANK_PATIENCE_S)
            assert engine.stats.num_respawns == 1
            assert_ended(starting)
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_ranks_end_with_a_leader_that_is_killed_while_all_load(model: Path) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(rank_config(model, TWO, {"faults": QUICK_FAULTS}))
        await engine.start()
        try:
            core = psutil.Process()
            while not (loading := [p for child in core.children(recursive=True) for p in followers(child.pid)]):
                await asyncio.sleep(0.01)
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


def test_a_rank_that_cannot_load_says_why(model: Path) -> None:
    config = change_config(rank_config(model, TWO), model=str(model.parent / "missing"))
    members = RankSupervisor()
    members.start(run_rank, config, config.parallel.topology.ranks[1:], SharedMemory.create().fd, {})
    with pytest.raises(ModelError, match="missing"):
        members.await_ready(lambda *_: None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "topology"),
    [(kind, TWO) for kind in ("qwen3", *EXPERTS)]
    + [("qwen3", topology) for topology in (Topology(tensor=4), Topology(pipeline=2), Topology(tensor=2, pipeline=2))]
    + [(kind, topology) for kind in EXPERTS for topology in (Topology(tensor=4, expert=2), ROWS, Topology(pipeline=2))],
)
def test_streams_survive_a_hundred_deaths(tmp_path: Path, kind: str, topology: Topology) -> None:
    points: dict[str, list[object]] = {}
    for epoch in range(2, 60, 6):
        points |= {str(epoch): ["rank", 0], str(epoch + 2): ["after", 2 + epoch % 7], str(epoch + 4): ["load", 0]}
    model = make_checkpoint(tmp_path / "model", kind=kind, dtype="bfloat16", **FOR_KERNELS.get(kind, {}))
    wanted = answered(model, rank_config(model, Topology()), max_tokens=300)[0][1]
    survive(model, topology, wanted, 100 - len(points), points, max_tokens=300)
