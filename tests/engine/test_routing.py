"""Where requests of data-parallel replicas go: to cached prefixes, unless those are too busy."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.bench.simulator import Machine
from pypto_serving.bench.traces import EXCERPT, load_trace
from pypto_serving.engine import routing
from pypto_serving.engine.routing import AFFINITY, KnownPrefixes, Router
from pypto_serving.model.null_models import plain_groups
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.kv import WindowSpec
from pypto_serving.types.request import StepStats
from pypto_serving.types.tier import TierConfig
from tests.engine.virtual_group import VirtualReplica, serve
from tests.simulation import null_config
from tests.thinning import examples

IDLE = StepStats()


class Group:
    """A router, and requests that it placed, named in order of arrival."""

    def __init__(self, num_replicas: int, blocks: int = 4000, **changes: object) -> None:
        self.router = Router(null_config(num_blocks=blocks, max_model_len=8192, **changes), num_replicas)
        self.stats: Sequence[StepStats] = [IDLE] * num_replicas
        self.count = 0

    def best(self, prompt: Sequence[int], salt: str = "") -> int:
        return self.router.order(len(prompt), self.router.links(pack_ids(prompt), salt), self.stats)[0]

    def place(self, prompt: Sequence[int], salt: str = "") -> int:
        """Route one request and return its replica."""
        replica = self.best(prompt, salt)
        self.router.add_requests(replica, [str(self.count)], len(prompt), self.router.links(pack_ids(prompt), salt))
        self.count += 1
        return replica

    def finish(self, *requests: int) -> None:
        for request in requests:
            self.router.begin_output(str(request))
            self.router.finish(str(request))


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=length)


def test_new_prompts_go_to_the_replica_that_computed_least() -> None:
    group = Group(3)
    placed = []
    for i in range(6):
        placed.append(group.place(prompt(500, i)))
        group.finish(i)
    assert sorted(placed) == [0, 0, 1, 1, 2, 2]


def test_a_prefix_is_followed_to_its_replica() -> None:
    group, shared = Group(3), prompt(512, 1)
    first = group.place(shared)
    group.place(prompt(300, 2))
    group.finish(0, 1)
    assert group.best(shared + prompt(40, 3)) == first
    assert group.best(shared, salt="another tenant") != first


def test_a_busy_replica_is_left_for_another_at_the_cost_that_the_formula_says() -> None:
    group, shared = Group(2), prompt(512, 1)
    home = group.place(shared)
    group.finish(0)
    saved = AFFINITY * 512
    group.router.add_requests(home, ["short"], saved - 100, [])
    assert group.best([*shared, 7]) == home
    group.router.add_requests(home, ["more"], 200, [])
    assert group.best([*shared, 7]) == 1 - home
    group.router.begin_output("short")
    assert group.best([*shared, 7]) == home


def test_requests_that_decode_count_by_measured_speeds() -> None:
    group = Group(2)
    group.stats = [StepStats(generation_tokens=100, prefill_per_s=1000.0, decode_per_s=10.0), IDLE]
    group.place(prompt(10, 1))
    group.finish(0)
    group.router.add_requests(0, ["decodes"], 1, [])
    group.router.begin_output("decodes")
    costly = 100 / 2 * (1000 / 10)  # half of the mean output, in prompt tokens
    group.router.add_requests(1, ["waits"], int(costly) - 1000, [])
    assert group.best(prompt(20, 2)) == 1
    group.router.add_requests(1, ["waits too"], 2000, [])
    assert group.best(prompt(20, 2)) == 0


def test_what_a_lost_replica_held_is_forgotten() -> None:
    group, shared = Group(2), prompt(512, 1)
    home = group.place(shared)
    group.router.lose(home)
    assert group.best(shared) == 1 - home
    group.router.finish("0")
    assert not group.router._unfinished


def test_what_the_device_of_a_dead_worker_held_is_forgotten() -> None:
    """Requests that go on compute their prompts again, so these will be there."""
    group, ended, goes_on = Group(2), prompt(512, 1), prompt(256, 2)
    home = group.place(ended)
    group.finish(0)
    group.router.add_requests(home, ["goes on"], 256, group.router.links(pack_ids(goes_on), ""))
    group.router.lose_device(home)
    group.router.finish("goes on")
    assert group.best(ended) == 1 - home
    assert group.best(goes_on) == home


def test_what_tiers_hold_outlives_a_worker() -> None:
    group, shared = Group(2, tiers=(HOST_TIER,)), prompt(512, 1)
    home = group.place(shared)
    group.finish(0)
    group.router.lose_device(home)
    assert group.best(shared) == home


SMALL, HOST_TIER = 65, TierConfig(tier="host", size_bytes=1 << 20, num_slots=(64,))
WITH_WINDOW = (
    *plain_groups(16),
    WindowSpec(name="window", block_size=16, window=32, tensors=plain_groups(16)[0].tensors),
)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"num_blocks": SMALL}, False),
        ({"num_blocks": 2 * SMALL}, True),
        ({"num_blocks": SMALL, "tiers": (HOST_TIER,)}, True),
        ({"num_blocks": (2 * SMALL, 9), "groups": WITH_WINDOW}, True),
        ({"num_blocks": (SMALL, 2 * SMALL), "groups": WITH_WINDOW}, False),
    ],
    ids=["full", "room", "tier", "window", "full beside a window"],
)
def test_a_replica_holds_what_fits_its_history(changes: dict[str, Any], holds: bool) -> None:
    """Three prompts of 512 tokens, and room for 1,024 or 2,048."""
    router = Router(null_config(**changes), 2)
    first, *others = (router.links(pack_ids(prompt(512, seed)), "") for seed in range(3))
    assert len(first) == 4
    for name, links in enumerate([first, *others]):
        router.add_requests(0, [str(name)], 512, links)
        router.finish(str(name))
    assert (router.order(513, first, [IDLE] * 2)[0] == 0) == holds


def test_the_choices_of_a_prompt_compute_it_once() -> None:
    group = Group(2)
    group.router.add_requests(0, ["a", "b", "c"], 500, [])
    assert group.router._loads[0].prompt_tokens == 500
    group.router.finish("a")
    assert group.router._loads[0].prompt_tokens == 0


def test_without_a_prefix_cache_only_work_counts() -> None:
    group = Group(2, enable_prefix_caching=False)
    same = prompt(512, 1)
    assert group.place(same) != group.place(same)


@examples(50)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=40), st.integers(1, 12))
def test_known_prefixes_keep_the_newest_links(touched: list[list[int]], capacity: int) -> None:
    known, order = KnownPrefixes(capacity), list[int]()
    for links in touched:
        known.touch([bytes([link]) for link in links])
        order = [link for link in order if link not in links] + links[::-1]
        order = order[-capacity:]
        held = [link in order for link in links]
        assert known.count_held([bytes([link]) for link in links]) == [*held, False].index(False)
        assert all(held[i] or not held[i + 1] for i in range(len(links) - 1)), (
            "a link is kept without the one before it"
        )


def served(num_replicas: int, token_s: float) -> list[VirtualReplica]:
    trace = load_trace(EXCERPT).scaled(Fraction(1, 4))
    machine = Machine(block_size=32, device_tokens=640_000, max_num_seqs=64, step_s=0.01, token_s=token_s)
    return serve(trace, machine, num_replicas)


def hit_tokens(replicas: Sequence[VirtualReplica]) -> int:
    return sum(replica.hit_tokens for replica in replicas)


@functools.cache
def hits_of_one(token_s: float) -> int:
    return hit_tokens(served(1, token_s))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("token_s", [1e-5, 5e-5, 1e-4], ids=["idle", "busy", "behind"])
def test_replicas_under_the_conversation_trace(num_replicas: int, token_s: float) -> None:
    """Together they hit as much as one that has their memory and speed, and each computes as much as the others."""
    replicas, best = served(num_replicas, token_s), hits_of_one(token_s)
    assert sum(replica.num_prompts for replica in replicas) == len(load_trace(EXCERPT).requests)
    assert best > 30_000
    assert hit_tokens(replicas) > 0.95 * best
    computed = [replica.computed_tokens for replica in replicas]
    assert max(computed) < 1.15 * sum(computed) / num_replicas


def test_replicas_that_are_chosen_by_load_alone_hit_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "AFFINITY", 0)
    assert hit_tokens(served(4, 5e-5)) < 0.9 * hits_of_one(5e-5)
