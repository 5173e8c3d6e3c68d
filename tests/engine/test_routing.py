"""Where requests of data-parallel replicas go: to cached prefixes, unless those are too busy."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypto_serving.bench.traces import EXCERPT, TRACE_BLOCK, Trace, load_trace
from pypto_serving.engine.routing import AFFINITY, LINK_TOKENS, KnownPrefixes, Router
from pypto_serving.types.stats import StepStats
from pypto_serving.types.tokens import pack_ids
from tests.simulation import null_config

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
        self.router.add(replica, [str(self.count)], len(prompt), self.router.links(pack_ids(prompt), salt))
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
    group.router.add(home, ["short"], saved - 100, [])
    assert group.best([*shared, 7]) == home
    group.router.add(home, ["more"], 200, [])
    assert group.best([*shared, 7]) == 1 - home
    group.router.begin_output("short")
    assert group.best([*shared, 7]) == home


def test_requests_that_decode_count_by_measured_speeds() -> None:
    group = Group(2)
    group.stats = [StepStats(generation_tokens=100, prefill_per_s=1000.0, decode_per_s=10.0), IDLE]
    group.place(prompt(10, 1))
    group.finish(0)
    group.router.add(0, ["decodes"], 1, [])
    group.router.begin_output("decodes")
    costly = 100 / 2 * (1000 / 10)  # half of the mean output, in prompt tokens
    group.router.add(1, ["waits"], int(costly) - 1000, [])
    assert group.best(prompt(20, 2)) == 1
    group.router.add(1, ["waits too"], 2000, [])
    assert group.best(prompt(20, 2)) == 0


def test_what_a_lost_replica_held_is_forgotten() -> None:
    group, shared = Group(2), prompt(512, 1)
    home = group.place(shared)
    group.router.lose(home)
    assert group.best(shared) == 1 - home
    group.router.finish("0")
    assert not group.router._replica_of


def test_the_choices_of_a_prompt_compute_it_once() -> None:
    group = Group(2)
    group.router.add(0, ["a", "b", "c"], 500, [])
    assert group.router._works[0].prompt_tokens == 500
    group.router.finish("a")
    assert group.router._works[0].prompt_tokens == 0


def test_without_a_prefix_cache_only_work_counts() -> None:
    group = Group(2, enable_prefix_caching=False)
    same = prompt(512, 1)
    assert group.place(same) != group.place(same)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=40), st.integers(1, 12))
def test_known_prefixes_keep_the_newest_links(touched: list[list[int]], capacity: int) -> None:
    known, order = KnownPrefixes(capacity), list[int]()
    for links in touched:
        known.touch([bytes([link]) for link in links])
        order = [link for link in order if link not in links] + links[::-1]
        order = order[-capacity:]
        held = [link in order for link in links]
        assert known.count([bytes([link]) for link in links]) == [*held, False].index(False)
        assert all(held[i] or not held[i + 1] for i in range(len(links) - 1)), (
            "a link is kept without the one before it"
        )


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_conversation_trace_hits_like_one_cache_and_is_shared_out_evenly(num_replicas: int) -> None:
    """Each replica has room for its part of what one cache of the total size holds."""
    trace = load_trace(EXCERPT).scaled(Fraction(LINK_TOKENS, TRACE_BLOCK))
    single, group = Group(1, TOTAL_BLOCKS), Group(num_replicas, TOTAL_BLOCKS // num_replicas)
    best, found = replay(single, trace), replay(group, trace)
    given = group.router._given
    assert best > 0.03 * trace.prompt_tokens
    assert found > 0.95 * best
    assert max(given) < 1.15 * sum(given) / num_replicas


TOTAL_BLOCKS = 200_000 // 16


def replay(group: Group, trace: Trace) -> int:
    """Route the requests of a trace as they arrive, each of which takes 20 s; return the tokens that hit."""
    hits, ends = 0, deque[float]()
    for number, request in enumerate(trace.requests):
        while ends and ends[0] < request.arrival_s:
            ends.popleft()
            group.finish(number - len(ends) - 1)
        tokens = trace.token_ids(request, 0, 100).tolist()
        links = group.router.links(pack_ids(tokens), "")
        before = [known.count(links) for known in group.router._known]
        hits += before[group.place(tokens)] * LINK_TOKENS
        ends.append(request.arrival_s + 20)
    return hits
