"""Replicas of several ranks: what they are asked, the processes of the ranks that follow, and how they are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from pypto_serving.api.generation.request import encode_bad_words
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import StepStats
from pypto_serving.types.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.configs import change_config
from tests.deepseek_v4 import let_drafts_agree
from tests.e2e.changing import CHANGES
from tests.e2e.engines import FOR_KERNELS, QUICK_FAULTS, Killer, Reply, answers, engine_config, replies, run_engine
from tests.engine.event_reader import EventReader

ENDED_S = 10
"""Longest time that the processes of a dead leader may take to end."""


NUM_STREAMS, MAX_TOKENS = 16, 30
TIGHT = {"kv_memory": "500KiB", "max_num_batched_tokens": 48}
"""Options with which prompts are computed in chunks, and requests are preempted."""
MTP: dict[str, Any] = {"spec_method": "mtp", "spec_tokens": 2}
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}
"""Options with which tokens are drafted."""


def make_drafting_checkpoint(path: Path) -> Path:
    """Write a checkpoint of DeepSeek V4 whose draft layer is right often."""
    model = make_checkpoint(path, "deepseek_v4_fast", "bfloat16", **FOR_KERNELS["deepseek_v4_fast"])
    let_drafts_agree(model)
    return model


def rank_config(model: Path, topology: Topology, changes: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    """The configuration of a replica whose ranks compute on one thread each."""
    sizes = {f"{name}_parallel_size": getattr(topology, name) for name in ("tensor", "pipeline", "expert")}
    if topology.data > 1:
        sizes |= {"tensor_parallel_size": 1, "data_parallel_size": topology.data}
    return engine_config(model, changes, num_threads=topology.num_ranks, **sizes, **options)


def streams(model: Path, seed: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of which half begin alike; greedy and sampled, most with changed logits, all with log-probabilities."""
    rng, tokenizer = random.Random(seed), Tokenizer.load(model)
    shared = rng.choices(range(250), k=140)
    prompts = [shared * (i % 2) + rng.choices(range(250), k=rng.randrange(4, 90)) for i in range(NUM_STREAMS)]
    common = {"logprobs": 3, "max_tokens": max_tokens, "ignore_eos": True}
    given = [common | {"temperature": i % 2, "seed": i} | CHANGES[i % len(CHANGES)] for i in range(NUM_STREAMS)]
    return prompts, [encode_bad_words(SamplingParams(**each), tokenizer) for each in given]


def answered(
    model: Path,
    config: EngineConfig,
    seeds: Sequence[int] = (1,),
    max_tokens: int = MAX_TOKENS,
    then: Callable[[AsyncEngine], None] = lambda engine: None,
) -> tuple[dict[int, list[Reply]], StepStats]:
    """What the streams of each seed get, and the engine's statistics before `then`. Blocks of tiers are loaded."""

    async def scenario(engine: AsyncEngine) -> tuple[dict[int, list[Reply]], StepStats]:
        found = {seed: await replies(engine, *streams(model, seed, max_tokens)) for seed in seeds}, engine.stats
        then(engine)
        return found

    found: tuple[dict[int, list[Reply]], StepStats] = run_engine(loading_blocks(config), scenario)
    return found


def loading_blocks(config: EngineConfig) -> EngineConfig:
    """Load blocks rather than compute them, however fast either is on this machine; see faulty_worker."""
    options = {**config.worker.backend_options, "instant": True}
    return change_config(config, worker_module="tests.faulty_worker", backend_options=options)


def announced(engine: AsyncEngine) -> dict[int, set[int]]:
    """Hashes of the blocks that KV events say are on the device or in a tier, by KV group."""
    (endpoints,) = engine.kv_events
    held = defaultdict[int, set[int]](set)
    with EventReader(*endpoints) as reader:
        reader.replay(0)
        for (_, group), blocks in reader.index.items():
            held[group] |= blocks.keys()
    return held


def hits(stats: StepStats, name: str) -> int:
    return sum(tier.hit_tokens for tier in stats.tiers if tier.tier == name)


def followers(leader: int) -> list[psutil.Process]:
    """The ranks that follow a leader, in order."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(leader).children()
        return sorted((child for child in children if follows(child)), key=lambda child: child.pid)
    return []


def follows(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return bool(process.name().startswith("rank "))
    return False


def is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def assert_ended(processes: Collection[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=ENDED_S)
    assert not alive, f"left behind: {alive}"


class RankKiller(Killer):
    """Kills any rank of the group instead, and remembers all of them."""

    def __init__(self, engine: AsyncEngine, count: int, seed: int, planned: Collection[int] = ()) -> None:
        super().__init__(engine, count, seed, planned)
        self.seen: list[psutil.Process] = []
        self.killed_ranks: list[int] = []
        self._choice = random.Random(seed)

    def group(self, leader: int) -> list[psutil.Process]:
        return [psutil.Process(leader), *followers(leader)]

    def _kill(self, pid: int) -> None:
        group = self.group(pid)
        self.seen += group[1:]
        rank = self._choice.randrange(len(group))
        self.killed_ranks.append(rank)
        super()._kill(group[rank].pid)


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def survive(
    model: Path,
    topology: Topology,
    wanted: list[Reply],
    kills: int,
    points: dict[str, list[object]],
    max_tokens: int = MAX_TOKENS,
    **options: Any,
) -> None:
    """Kill ranks at random until all `kills` are done; `points` are lives that end by themselves, see faulty_worker.

    If `options` ask for drafts, some are accepted and some rejected.
    """
    prompts, params = streams(model, 1, max_tokens)

    async def scenario(engine: AsyncEngine) -> None:
        killers: list[RankKiller] = []
        while left := kills - sum(killer.killed for killer in killers):
            seed = kills + 4 * len(killers)  # not all of them kill the same rank
            killers.append(RankKiller(engine, left, seed=seed, planned=[int(epoch) for epoch in points]))
            assert await replies(engine, prompts, params, killers[-1]) == wanted
        assert await answers(engine, [[5, 6, 7]])  # after the last death
        assert engine.stats.num_respawns == kills + len(points)
        assert len(set().union(*(killer.killed_ranks for killer in killers))) > 1
        if engine.config.num_drafts:
            assert 0 < sum(engine.stats.accepted_at) < engine.stats.num_drafts
        seen = [process for killer in killers for process in killer.seen]
        assert_ended([process for process in seen if process not in followers(worker_of(engine))])

    changes = {"faults": QUICK_FAULTS, "worker_module": "tests.faulty_worker", "backend_options": {"faults": points}}
    run_engine(rank_config(model, topology, changes, **options), scenario)


def worker_of(engine: AsyncEngine) -> int:
    assert engine.ready is not None
    return engine.ready.worker_pid
