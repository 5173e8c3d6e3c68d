"""Tails of window and state groups are kept at checkpoints, and there alone: in every tier, however steps were cut."""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.null.program import NullBackend
from pypto_serving.kv.group import ResumePoints, make_groups
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.model.null_models import deepseek_v4_groups
from pypto_serving.store.files import FileStore
from pypto_serving.types.kv import (
    CHECKPOINT_TOKENS,
    FullSpec,
    KVCacheGroupSpec,
    StateSpec,
    WindowSpec,
    max_live_blocks,
    publication_lag,
)
from pypto_serving.types.request import ClearCache
from pypto_serving.types.tier import TierConfig, TransferDone
from pypto_serving.util import ceil_div
from tests.kv.groups import GROUPS, blocks_in_use, group, take_jobs
from tests.simulation import Simulation, in_pages, null_config
from tests.thinning import examples

GROUP_SETS: dict[str, tuple[KVCacheGroupSpec, ...]] = {
    "deepseek_v4": deepseek_v4_groups(),
    "deepseek_v4 in pages": in_pages(deepseek_v4_groups(), 128),
    "periods and blocks": (group(FullSpec, 16), group(StateSpec, 24, period=20, overlap=13)),
    "long window": (group(FullSpec, 32), group(WindowSpec, 16, window=400)),
    "no common block": (group(FullSpec, 96), group(WindowSpec, 64, window=64)),
}


@examples(80)
@given(GROUPS, st.integers(0, 60), st.integers(0, 60))
def test_useful_blocks_are_those_that_some_position_needs(
    groups: tuple[KVCacheGroupSpec, ...], start: int, length: int
) -> None:
    points, end = ResumePoints(groups), start + length
    positions = [n for n in range(1, 1200) if points.last(n) == n]
    assert positions == [n for n in range(1, 1200) if all(n % spec.block_size == 0 for spec in groups)]
    for one in make_groups(groups, points, None):
        needed = {i for n in positions for i in one.needed(n)}
        ended = range(start // one.block_size, end // one.block_size)
        assert list(one.useful(start, end)) == [i for i in ended if i in needed]


@examples(80)
@given(GROUPS, st.integers(0, 100))
def test_a_block_is_passed_once_it_is_not_needed(groups: tuple[KVCacheGroupSpec, ...], num_tokens: int) -> None:
    for one in make_groups(groups, ResumePoints(groups), None):
        first = one.needed(num_tokens).start
        passed_at = one.passed_at(first)
        assert (passed_at == math.inf) == one.keeps_history
        for n in range(num_tokens, min(passed_at, num_tokens + 50)):
            assert one.needed(n).start == first
        assert one.keeps_history or one.needed(int(passed_at)).start > first


@pytest.mark.parametrize("kind", GROUP_SETS)
def test_every_sequence_has_checkpoints_at_the_same_positions(kind: str) -> None:
    points = ResumePoints(GROUP_SETS[kind])
    assert points.interval == {"no common block": 2112, "periods and blocks": 2064}.get(kind, CHECKPOINT_TOKENS)
    assert list(points.checkpoints(0, 5000, 5000)) == [points.interval, 2 * points.interval, points.last(5000)]
    assert list(points.checkpoints(points.interval, 5000, 6000)) == [2 * points.interval]
    assert list(points.checkpoints(0, points.interval - 1, 6000)) == []


def settle_transfers(kv: KVCacheManager) -> None:
    """Every transfer that is due works."""
    while jobs := take_jobs(kv, 1.0):
        for job in jobs:
            kv.transferred(TransferDone(job.job_id, b"\1" * (len(job.groups) // 4), 0.001), 1.0)
            kv.check()


def stored(kv: KVCacheManager, request_id: str) -> list[set[int]]:
    """Blocks of a request, by group, that the lower tier holds."""
    (tier,) = kv.tiers.tiers
    parts = kv._sequences[request_id].tables
    return [{i for i, key in enumerate(part.keys) if tier.find(part.group, key) is not None} for part in parts]


@examples(60)
@given(st.sampled_from(sorted(GROUP_SETS)), st.data())
def test_of_window_and_state_groups_the_tails_at_checkpoints_go_down(kind: str, data: st.DataObject) -> None:
    """Also with steps in flight, and where keys are known later than their blocks are computed. Nothing is evicted."""
    groups = tuple(
        msgspec.structs.replace(spec, key_lookahead=data.draw(st.sampled_from([0, 0, 1, 200]), label="lookahead"))
        for spec in GROUP_SETS[kind]
    )
    lag, depth = publication_lag(groups), data.draw(st.integers(1, 3), label="depth")
    prompt_len = data.draw(st.integers(100, 5000), label="prompt")
    total = prompt_len + data.draw(st.integers(1, 300), label="output")
    longest, rng = (
        data.draw(st.sampled_from([16, 300, 5000]), label="chunk"),
        random.Random(data.draw(st.integers(0, 99))),
    )
    tokens = array("i", range(total))
    slots = tuple(ceil_div(total, spec.block_size) for spec in groups)
    live = max_live_blocks(groups, total, depth * longest + lag)
    blocks = tuple(map(sum, zip(slots, live, strict=True)))
    kv = KVCacheManager(groups, blocks, tiers=[TierConfig(tier="host", size_bytes=0, num_slots=slots)])
    kv.match("a", tokens[:prompt_len])
    ends = [0]
    while ends[-1] < total - 1:
        left = prompt_len - ends[-1]
        ends.append(ends[-1] + (min(left, rng.randint(1, longest)) if left > 0 else 1))
    for i, end in enumerate(ends[1:], 1):
        assert kv.reserve("a", ends[min(len(ends), i + depth) - 1]) is not None
        kv.commit("a", tokens[: max(end, prompt_len)], end, prompt_len)
        kv.check()
        if i % 7 == 0:
            settle_transfers(kv)
    last = kv.points.last(max(0, total - 1 - lag))
    kv.release("a")
    settle_transfers(kv)
    marks = {*range(kv.points.interval, last + 1, kv.points.interval), min(last, kv.points.last(prompt_len)), last}
    for spec, one, blocks_of_g in zip(groups, kv.groups, stored(kv, "a"), strict=True):
        tails = {i for n in marks for i in one.needed(n)}
        assert blocks_of_g == (set(range(last // spec.block_size)) if spec.keeps_history else tails)
    assert blocks_in_use(kv) == (0,) * len(groups)


@examples(15)
@given(
    kind=st.sampled_from(sorted(GROUP_SETS)),
    lookahead=st.sampled_from([0, 1, 150]),
    chunk=st.sampled_from([1, 7, 64, 300]),
    depth=st.integers(1, 3),
    prompt_len=st.integers(1, 1500),
    answer_len=st.sampled_from([1, 40, 140]),
    caching=st.booleans(),
)
def test_a_sequence_fits_blocks_for_one(
    kind: str, lookahead: int, chunk: int, depth: int, prompt_len: int, answer_len: int, caching: bool
) -> None:
    """And twice in a row, so that what is cached of the first must make way for the second."""
    groups = tuple(msgspec.structs.replace(spec, key_lookahead=lookahead) for spec in GROUP_SETS[kind])
    prompt_len = min(prompt_len, 300 * chunk)  # more than windows and lookahead, in at most 300 steps
    longest = prompt_len + answer_len + 10
    live = max_live_blocks(groups, longest, chunk * depth + publication_lag(groups))
    config = null_config(
        groups,
        tuple(1 + blocks for blocks in live),
        max_model_len=longest,
        max_num_batched_tokens=chunk,
        depth=depth,
        enable_prefix_caching=caching,
    )
    simulation = Simulation(config)
    for first in (1, 2):
        request_id = simulation.add([first, *range(prompt_len - 1)], max_tokens=answer_len)
        simulation.run()
        simulation.assert_correct(request_id)
    assert simulation.counters.num_preemptions == 0


CHUNKS = (64, 100, 512, 3000)
LONGEST = 5400


def replica(chunk: int, tiers: tuple[TierConfig, ...] = (), page: int = 0, **changes: Any) -> Simulation:
    """A DeepSeek V4, with a `page` size of all groups if one is given, of which one sequence fits on the device."""
    groups = in_pages(deepseek_v4_groups(), page) if page else deepseek_v4_groups()
    blocks = tuple(live + 40 for live in max_live_blocks(groups, LONGEST, chunk * changes.get("depth", 1)))
    return Simulation(
        null_config(groups, blocks, tiers=tiers, max_model_len=LONGEST, max_num_batched_tokens=chunk, **changes)
    )


def tier(name: Any, place: Path | str = "") -> TierConfig:
    slots = tuple(100 for _ in deepseek_v4_groups())
    return TierConfig(tier=name, size_bytes=1 << 30, num_slots=slots, place=str(place))


PROMPT = [(37 * i + i // 1000) % 1000 for i in range(5000)]


def cached(simulation: Simulation, shared: int) -> dict[str, int]:
    """Cached tokens by tier of a request that shares so many tokens with PROMPT; its answer must be right."""
    request_id = simulation.add([*PROMPT[:shared], *([7] * 50)], max_tokens=3)
    simulation.run()
    simulation.assert_correct(request_id)
    counts = zip(("device", "host", "disk", "remote"), simulation.last[request_id].cached_by_tier, strict=True)
    return {name: count for name, count in counts if count}


def forget_device(simulation: Simulation) -> None:
    simulation.client.send(ClearCache(("device",)))
    simulation.turn()


def test_the_end_of_a_prompt_that_others_have_computed_is_kept_too() -> None:
    simulation = replica(512, (tier("host"),))
    longer = simulation.add(PROMPT[:1900], max_tokens=400)
    while longer not in simulation.last:
        simulation.turn()
    simulation.add([*PROMPT[:1024], 1, 2, 3], max_tokens=300)
    simulation.run()
    forget_device(simulation)
    assert cached(simulation, 1024) == {"host": 1024}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page", [0, 128])
def test_a_prompt_is_resumed_at_its_checkpoints_on_the_device_and_in_host_memory(
    chunk: int, depth: int, page: int
) -> None:
    simulation = replica(chunk, (tier("host"),), page, depth=depth)
    simulation.add(PROMPT)
    simulation.run()
    for shared, expected in ((2048, 2048), (2100, 2048), (4096, 4096), (4200, 4096), (5000, 4992)):
        assert cached(simulation, shared) == {"device": expected}
    for shared, expected in ((2048, 2048), (2100, 2048), (3000, 2048), (4100, 4096), (4990, 4096), (5000, 4992)):
        forget_device(simulation)
        assert cached(simulation, shared) == {"host": expected}
    forget_device(simulation)
    assert cached(simulation, 2047) == {}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_is_resumed_at_its_checkpoints_after_a_restart(chunk: int, memory_disk: Path) -> None:
    simulation = replica(chunk, (tier("disk", memory_disk),))
    simulation.add(PROMPT)
    simulation.run()
    simulation.executor.stop()
    again = replica(chunk, (tier("disk", memory_disk),))
    for shared, expected in ((2100, 2048), (4990, 4096), (5000, 4992)):
        assert cached(again, shared) == {"disk": expected}
        forget_device(again)
    again.executor.stop()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_second_replica_resumes_at_checkpoints_of_the_first(chunk: int, memory_disk: Path) -> None:
    """The ends of prompt and turn, which only the first one knows, are among them."""

    def sharing() -> Simulation:
        simulation = replica(chunk, (tier("disk", memory_disk),))
        program = NullBackend(simulation.config).prepare(lambda phase, done, total: None)
        sizes = program.memory.block_bytes
        simulation.executor.stores["disk"] = FileStore(memory_disk, b"", sizes, (100,) * len(sizes))
        simulation.turn()
        return simulation

    first, second = sharing(), sharing()
    turn = first.add(PROMPT, max_tokens=200)
    first.run()
    for shared, expected in ((2100, 2048), (4990, 4096), (5000, 4992)):
        assert cached(second, shared) == {"disk": expected}
        forget_device(second)
    follow_up = second.add([*PROMPT, *first.tokens[turn], 1, 2, 3])
    second.run()
    second.assert_correct(follow_up)
    assert second.last[follow_up].cached_by_tier == (0, 0, 5120, 0)
    first.executor.stop()
    second.executor.stop()


def test_tails_on_the_device_are_cached_blocks_like_others() -> None:
    """Nothing but what a sequence may need at once refers to blocks, and checkpoints go when others need the room."""
    simulation = replica(64)
    simulation.add(PROMPT)
    simulation.run()
    kv = simulation.core.scheduler.kv
    assert blocks_in_use(kv) == (0,) * len(kv.groups)
    assert cached(simulation, 2100) == {"device": 2048}
    for i in range(3):
        simulation.add([i + 1, *PROMPT])
        simulation.run()
    assert cached(simulation, 2100) == {}
