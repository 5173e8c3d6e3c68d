"""While a sequence grows token by token, its windows and states take and give back blocks in runs."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.model.null_models import deepseek_v4_groups
from pypto_serving.types.kv import KVCacheGroupSpec, RecentSpec, max_live_blocks, publication_lag
from tests.kv.groups import GROUPS, blocks_in_use
from tests.simulation import Simulation, null_config
from tests.thinning import examples

PROMPT = 300


def live_blocks(kv: KVCacheManager, request_id: str) -> list[int]:
    """How many blocks of each group the table of a request holds."""
    return [len(part.live()) for part in kv._sequences[request_id].tables]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_a_decode_changes_its_tables_once_in_16_tokens(depth: int, caching: bool) -> None:
    """And where it can be resumed. What it holds then is what the memory plan has for it."""
    kv = KVCacheManager(deepseek_v4_groups(), (400,) * 6, prefix_caching=caching)
    tokens, grown, freed, most = array("i", range(1000)), [], [], [0] * 6
    kv.match("a", tokens[:PROMPT])
    kv.reserve("a", PROMPT)
    kv.commit("a", tokens[: PROMPT + 1], PROMPT, PROMPT)
    for end in range(PROMPT + 1, PROMPT + 401):
        if kv.reserve("a", end):
            grown.append(end)
        most = list(map(max, most, live_blocks(kv, "a")))
        computed = end - depth + 1
        if computed > PROMPT:
            before = blocks_in_use(kv)
            kv.commit("a", tokens[: computed + 1], computed, PROMPT)
            if blocks_in_use(kv) != before:
                freed.append(computed)
        kv.check()
    assert grown == [PROMPT + 1, *range(305, PROMPT + 401, 16)]
    assert all(computed % 128 == 0 for computed in freed)
    tails = [g for g, group in enumerate(kv.groups) if not group.keeps_history]
    planned = {
        g: spec.read_blocks(depth) for g, spec in enumerate(deepseek_v4_groups()) if isinstance(spec, RecentSpec)
    }
    assert {g: most[g] for g in tails} == planned


@examples(100)
@given(GROUPS, st.data())
def test_a_sequence_holds_no_more_than_planned(groups: tuple[KVCacheGroupSpec, ...], data: st.DataObject) -> None:
    """However its steps are cut, and however many of them are in flight."""
    groups = tuple(msgspec.structs.replace(g, key_lookahead=data.draw(st.sampled_from([0, 0, 3]))) for g in groups)
    lag, budget = publication_lag(groups), data.draw(st.sampled_from([1, 2, 5, 30]), label="unsettled")
    tokens = array("i", range(70))
    live = max_live_blocks(groups, len(tokens), budget + lag)
    caching = data.draw(st.booleans(), label="caching")
    kv = KVCacheManager(groups, tuple(1 + blocks for blocks in live), prefix_caching=caching)
    kv.match("a", tokens)
    computed = planned = 0
    while computed < len(tokens):
        most = min(budget - (planned - computed), len(tokens) - planned)
        step = data.draw(st.integers(int(computed == planned), most), label="step")
        if step:
            planned += step
            assert kv.reserve("a", planned) is not None
            width = zip(groups, kv.table("a"), strict=True)
            assert all(len(table) <= g.table_blocks(planned) for g, table in width)
        else:
            computed = data.draw(st.integers(computed + 1, planned), label="computed")
            kv.commit("a", tokens[:planned], computed, len(tokens))
        kv.check()
    kv.forget("a")
    assert blocks_in_use(kv) == (0,) * len(groups)


def test_the_last_run_may_end_behind_the_longest_sequence() -> None:
    """Tables in the worker are as wide."""
    groups = deepseek_v4_groups()
    live = max_live_blocks(groups, 291, 64)
    simulation = Simulation(null_config(groups, tuple(1 + blocks for blocks in live), max_model_len=291))
    request_id = simulation.add(range(270), max_tokens=100)
    simulation.run()
    assert len(simulation.tokens[request_id]) == 21
    simulation.assert_correct(request_id)
