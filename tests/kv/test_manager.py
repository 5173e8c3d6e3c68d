"""KVCacheManager: all-or-nothing growth, publication, and the hit rule against a brute-force oracle."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.errors import ConfigError
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.kv import CompressedSpec, FullSpec, KVCacheGroupSpec, StateSpec, WindowSpec
from tests.kv.groups import GROUPS, blocks_in_use, group, tensor
from tests.simulation import in_pages
from tests.thinning import examples


def ids(*values: int) -> array[int]:
    return array("i", values)


def manager(groups: tuple[KVCacheGroupSpec, ...], num_blocks: int = 64) -> KVCacheManager:
    return KVCacheManager(groups, (num_blocks,) * len(groups))


def compute(kv: KVCacheManager, request_id: str, tokens: array[int]) -> int:
    """Let a request match, grow and commit in one go; returns the tokens it found cached."""
    match = kv.match(request_id, tokens)
    assert kv.reserve(request_id, len(tokens), match) is not None
    kv.commit(request_id, tokens, len(tokens), len(tokens))
    return match


def test_growth_is_all_or_nothing_over_the_groups() -> None:
    groups = (group(FullSpec, 16), group(WindowSpec, 16, window=32))
    kv = KVCacheManager(groups, (64, 3))
    kv.match("a", ids(*range(80)))
    assert kv.reserve("a", 48) is None
    assert blocks_in_use(kv) == (0, 0), "a group kept blocks although another had none"
    assert kv.reserve("a", 32) is not None
    kv.check()


def test_a_fully_cached_prompt_leaves_one_token_to_compute() -> None:
    kv = manager(plain_groups(4))
    tokens = ids(*range(16))
    compute(kv, "a", tokens)
    kv.forget("a")
    assert kv.match("b", tokens) == 12
    assert kv.match("c", ids(*range(17))) == 16


def test_hits_are_shared_and_survive_the_first_owner() -> None:
    kv = manager(plain_groups(4))
    assert compute(kv, "a", ids(*range(16))) == 0
    assert compute(kv, "b", ids(*range(12), 99, 98, 97)) == 12
    assert kv.table("a")[0][:3] == kv.table("b")[0][:3]
    kv.forget("a")
    kv.check()
    assert compute(kv, "c", ids(*range(12), 50)) == 12
    assert blocks_in_use(kv) == (5,)


def test_salt_separates_tenants() -> None:
    kv = manager(plain_groups(4))
    compute(kv, "a", ids(*range(16)))
    assert kv.match("b", ids(*range(16)), cache_salt="other") == 0


def test_groups_do_not_find_each_others_keys() -> None:
    kv = manager((group(FullSpec, 4), group(CompressedSpec, 4)))
    compute(kv, "a", ids(*range(8)))
    keys = [set(group.pool._by_key) for group in kv.groups]
    assert keys[0] and keys[1] and keys[0].isdisjoint(keys[1])


def test_release_of_a_preempted_request_lets_it_find_its_own_blocks() -> None:
    kv = manager(plain_groups(4))
    tokens = ids(*range(14))
    compute(kv, "a", tokens)
    kv.release("a")
    assert blocks_in_use(kv) == (0,)
    assert kv.match("a", tokens) == 12


def test_window_blocks_are_given_back_once_out_of_reach() -> None:
    kv = manager((group(WindowSpec, 16, window=24),))
    tokens = ids(*range(160))
    kv.match("a", tokens)
    for end in range(16, 161, 16):
        kv.reserve("a", end)
        kv.commit("a", tokens, end, len(tokens))
    table = kv.table("a")[0]
    assert table[:8] == [0] * 8
    assert all(table[8:])
    kv.check()


def test_a_block_smaller_than_the_compress_ratio_is_refused() -> None:
    with pytest.raises(ConfigError, match="block size 2 must be a multiple of the compress ratio 4"):
        CompressedSpec(name="c", block_size=2, tensors=(tensor(ratio=4),))


def test_a_state_without_a_period_is_refused() -> None:
    with pytest.raises(ConfigError, match="period 0 must be at least 1, and overlap 4 at least 0"):
        group(StateSpec, 4, period=0, overlap=4)


@pytest.mark.parametrize("groups", [deepseek_v4_groups(), in_pages(deepseek_v4_groups(), 128)], ids=["small", "128"])
def test_deepseek_v4_hit_needs_the_blocks_that_its_caches_need(groups: tuple[KVCacheGroupSpec, ...]) -> None:
    """At 128-aligned n: all cmp and idx blocks, one ori, one csa_state, one csa_inner_state, no hca_state."""
    kv = manager(groups, 200)
    tokens = ids(*range(300))
    compute(kv, "a", tokens[:256])
    match = kv.match("b", tokens)
    assert match == 256
    blocks = kv.reserve("b", 256, match)
    assert blocks is not None
    live = {g.name: sum(1 for b in table if b) for g, table in zip(groups, blocks, strict=True)}
    assert live == {"ori": 1, "cmp": 2, "idx": 2, "hca_state": 0, "csa_state": 1, "csa_inner_state": 1}


def longest_accepted_by_all(kv: KVCacheManager, request_id: str, num_tokens: int) -> int:
    """The definition: the largest n < num_tokens that every group accepts, found by trying each one."""
    for n in range(num_tokens - 1, 0, -1):
        if all(_accepts(kv, g, request_id, n) for g in range(len(kv.groups))):
            return n
    return 0


def _accepts(kv: KVCacheManager, g: int, request_id: str, n: int) -> bool:
    spec, keys = kv.groups[g].spec, kv._sequences[request_id].tables[g].keys
    if n % kv.points.step:
        return False
    needed = range(n) if spec.keeps_history else range(spec.first_needed(n), n)
    return all(kv.groups[g].pool.find(keys[position // spec.block_size]) is not None for position in needed)


@examples(300)
@given(GROUPS, st.data())
def test_match_equals_the_brute_force_oracle(groups: tuple[KVCacheGroupSpec, ...], data: st.DataObject) -> None:
    kv = KVCacheManager(groups, tuple(data.draw(st.integers(12, 40), label="blocks") for _ in groups))
    for i in range(data.draw(st.integers(2, 6), label="requests")):
        prefix = data.draw(st.integers(0, 24), label="prefix")
        tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12), label="tail")
        tokens = ids(*range(prefix), *tail)
        match = kv.match(f"r{i}", tokens)
        assert match == longest_accepted_by_all(kv, f"r{i}", len(tokens))
        end = match
        while end < len(tokens):
            end = min(len(tokens), end + data.draw(st.integers(1, 9), label="chunk"))
            if kv.reserve(f"r{i}", end, match) is None:
                break
            kv.commit(f"r{i}", tokens, end, len(tokens))
        kv.check()
        if data.draw(st.booleans(), label="leave"):
            kv.forget(f"r{i}")
    for i in range(6):
        kv.forget(f"r{i}")
    kv.check()
    assert blocks_in_use(kv) == (0,) * len(groups)
