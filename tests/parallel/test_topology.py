"""Ranks have whole parts of a model: in order, disjoint, covering everything, and together no more than needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.parallel.topology import Rank, Topology
from pypto_serving.util import ceil_div

SIZES = st.integers(1, 12)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    expert = draw(st.integers(1, 4))
    tensor = expert * draw(st.integers(1, 4))
    data = draw(st.sampled_from([1, tensor]))
    return Topology(tensor=tensor, pipeline=draw(st.integers(1, 5)), expert=expert, data=data)


def stages(topology: Topology) -> list[list[Rank]]:
    """The ranks of each tensor group."""
    return [[rank for rank in topology.ranks if rank.stage == stage] for stage in range(topology.pipeline)]


def flat(parts: Iterable[range]) -> list[int]:
    return list(chain.from_iterable(parts))


def spread(parts: Sequence[range]) -> int:
    """How much longer the longest part is than the shortest."""
    return max(map(len, parts)) - min(map(len, parts))


def test_one_rank_has_everything() -> None:
    rank = Rank()
    assert Topology().ranks == (rank,)
    assert rank.leads and rank.embeds and rank.projects
    assert rank.layers(7) == range(7)
    assert (rank.heads(6, 2), rank.kv_heads(2)) == (range(6), range(2))
    assert (rank.columns(100), rank.vocabulary(100)) == (range(100), range(100))
    assert (rank.experts(5), rank.expert_columns(100)) == (range(5), range(100))


@given(topologies())
def test_ranks_are_numbered_stage_by_stage(topology: Topology) -> None:
    ranks = topology.ranks
    assert [rank.index for rank in ranks] == list(range(topology.num_ranks))
    assert [(rank.stage, rank.tensor) for rank in ranks] == [
        (stage, place) for stage in range(topology.pipeline) for place in range(topology.tensor)
    ]
    assert [rank.index for rank in ranks if rank.leads] == [0]
    assert {rank.stage for rank in ranks if rank.embeds} == {0}
    assert {rank.stage for rank in ranks if rank.projects} == {topology.pipeline - 1}


@given(topologies(), st.integers(0, 70))
def test_stages_split_the_layers_in_order(topology: Topology, num_layers: int) -> None:
    for place in range(topology.tensor):
        parts = [group[place].layers(num_layers) for group in stages(topology)]
        assert flat(parts) == list(range(num_layers))
        assert spread(parts) <= 1


@given(topologies(), st.integers(0, 300), st.integers(1, 32))
def test_columns_are_whole_units_in_order(topology: Topology, num_columns: int, unit: int) -> None:
    for group in stages(topology):
        parts = [rank.columns(num_columns, unit) for rank in group]
        assert flat(parts) == list(range(num_columns))
        assert all(0 <= part.start <= part.stop <= num_columns for part in parts)
        assert all(part.start % unit == 0 for part in parts if part)
        units = [range(ceil_div(len(part), unit)) for part in parts]
        assert spread(units) <= 1


@given(topologies(), SIZES, SIZES)
def test_query_heads_belong_to_the_kv_heads_of_their_rank(topology: Topology, num_kv_heads: int, group: int) -> None:
    num_heads = num_kv_heads * group
    for ranks in stages(topology):
        heads = [rank.heads(num_heads, num_kv_heads) for rank in ranks]
        kept = [rank.kv_heads(num_kv_heads) for rank in ranks]
        assert flat(heads) == list(range(num_heads))
        assert sorted(set(flat(kept))) == list(range(num_kv_heads))
        assert flat(part for rank, part in zip(ranks, kept, strict=True) if rank.writes_kv(num_kv_heads)) == [
            *range(num_kv_heads)
        ]
        assert topology.repeats_kv_heads(num_kv_heads) == (len(set(kept)) < len(kept))
        assert all({head // group for head in own} <= set(kv) for own, kv in zip(heads, kept, strict=True))
        assert all(before.start <= after.start for before, after in pairwise(kept))
        if num_kv_heads >= topology.tensor:
            assert flat(kept) == list(range(num_kv_heads))
            assert all(len(own) == group * len(kv) for own, kv in zip(heads, kept, strict=True))
        else:
            assert all(len(kv) == 1 for kv in kept)
        if num_heads >= topology.tensor:
            assert all(heads)
        if num_heads % topology.tensor == 0 and 0 in (topology.tensor % num_kv_heads, num_kv_heads % topology.tensor):
            assert spread(heads) == 0


@given(topologies(), SIZES, st.integers(0, 300))
def test_every_column_of_every_expert_has_one_rank(topology: Topology, num_experts: int, num_columns: int) -> None:
    for group in stages(topology):
        cells = [
            (expert, column)
            for rank in group
            for expert in rank.experts(num_experts)
            for column in rank.expert_columns(num_columns)
        ]
        assert sorted(cells) == [(expert, column) for expert in range(num_experts) for column in range(num_columns)]
        assert spread([rank.experts(num_experts) for rank in group]) <= 1


def test_expert_groups_share_experts_by_columns() -> None:
    ranks = Topology(tensor=4, expert=2).ranks
    assert [rank.experts(128) for rank in ranks] == [range(64), range(64), range(64, 128), range(64, 128)]
    assert [rank.expert_columns(128) for rank in ranks] == [range(64), range(64, 128)] * 2


def test_ranks_that_split_rows_have_attention_whole() -> None:
    assert {rank.attention for rank in Topology(tensor=2, expert=2, data=2).ranks} == {Rank()}
    assert [rank.attention for rank in Topology(tensor=2).ranks] == [*Topology(tensor=2).ranks]


@pytest.mark.parametrize(
    ("topology", "hosts", "connections"),
    [
        (Topology(tensor=3), [0, 0, 0], {}),
        (Topology(tensor=3, hosts=2), [0, 0, 1], {"steps": (0, 2), "blocks": (0, 2), "exchange": (0, 2)}),
        (
            Topology(tensor=2, pipeline=3, hosts=2),
            [0, 0, 0, 0, 1, 1],
            {"steps": (0, 4), "blocks": (0, 4), "rows": (2, 4), "logits": (0, 4)},
        ),
    ],
)
def test_hosts_have_stages_or_the_ranks_of_the_only_one(
    topology: Topology, hosts: list[int], connections: dict[str, tuple[int, int]]
) -> None:
    """Rows go from the last stage of one host to the first of the other; the leader gets logits of the last stage."""
    assert [rank.host for rank in topology.ranks] == hosts
    assert topology.connections == connections
    assert [*topology.on_host(0), *topology.on_host(1)] == [*topology.ranks]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"hosts": 2}, "1 ranks cannot be split among 2 hosts"),
        ({"tensor": 2, "hosts": 0}, "2 ranks cannot be split among 0 hosts"),
        ({"tensor": 3, "hosts": 3}, "3 ranks cannot be split among 3 hosts"),
        ({"tensor": 2, "expert": 2, "data": 2, "hosts": 2}, "ranks that split rows read the same KV cache"),
    ],
)
def test_hosts_that_cannot_share_ranks(sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Topology(**sizes)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (2, 1, 0), (4, 1, 3), (2, 1, 4), (2, 1, 1, 0), (4, 1, 1, 2)])
def test_sizes_that_do_not_go_together(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes of a topology|expert groups|split rows"):
        Topology(*sizes)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_rank_that_is_none(index: int) -> None:
    with pytest.raises(ValueError, match="is no rank of 4"):
        Rank(Topology(tensor=2, pipeline=2), index)


@given(topologies())
def test_ranks_travel_between_processes(topology: Topology) -> None:
    for rank in topology.ranks:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(rank), type=Rank) == rank
