"""Bytes of the weights that each rank holds."""

from __future__ import annotations

import pytest

from pypto_serving.parallel.topology import ModelParts, Rank, SplitWeights, TokenBytes, Topology, merged

WEIGHTS = (
    SplitWeights(layers=(0,), split="columns", outputs=100, num_bytes=1000),
    SplitWeights(layers=(0, 1), num_bytes=7),
    SplitWeights(layers=(1,), split="heads", num_bytes=800),
    SplitWeights(layers=(1,), split="kv_heads", num_bytes=200),
    SplitWeights(layers=(1,), split="attention", outputs=64, num_bytes=640),
    SplitWeights(layers=(1,), split="experts", outputs=64, unit=16, num_bytes=6400),
)
QUARTERS = [
    columns + 7 + 200 + 100 + attention + 1600 for columns, attention in [(320, 320), (320, 320), (320, 0), (40, 0)]
]
PARTS = ModelParts(num_layers=2, num_heads=8, num_kv_heads=2, hidden_size=64, num_experts=4, weights=WEIGHTS)


@pytest.mark.parametrize(
    ("topology", "held"),
    [
        (Topology(), [9047]),
        (Topology(tensor=2), [640 + 7 + 400 + 100 + 320 + 3200, 360 + 7 + 400 + 100 + 320 + 3200]),
        (Topology(tensor=2, expert=2, data=2), [640 + 7 + 1640 + 3200, 360 + 7 + 1640 + 3200]),
        (Topology(tensor=4), QUARTERS),
        (Topology(tensor=4, expert=2), QUARTERS),
        (Topology(pipeline=2), [1000 + 7, 7 + 800 + 200 + 640 + 6400]),
    ],
)
def test_each_rank_holds_its_part(topology: Topology, held: list[int]) -> None:
    assert [PARTS.weight_bytes(rank) for rank in topology.ranks] == held


@pytest.mark.parametrize(
    ("topology", "held"),
    [
        (Topology(), [1 + 80 + 800]),
        (Topology(tensor=2), [1 + 40 + 400] * 2),
        (Topology(tensor=2, expert=2, data=2), [1 + 40 + 800 + 8000] * 2),
        (Topology(pipeline=3), [1 + 80 + 800 + 8000, 1 + 80 + 800 + 2 * 8000, 1 + 80 + 800 + 8000]),
        (Topology(tensor=2, pipeline=2), [1 + 40 + 400 + 4000] * 4),
    ],
)
def test_each_rank_holds_activations_of_a_token(topology: Topology, held: list[int]) -> None:
    """Two steps in flight: two copies of x between two stages, half of which is counted for each."""
    token = TokenBytes(whole=1, split=80, attention=800, passed=8000)
    assert [token.held(rank, 2) for rank in topology.ranks] == held


def test_ranks_have_parts_of_all_heads() -> None:
    assert PARTS.head_share(Rank()) == 1
    assert [PARTS.head_share(rank) for rank in Topology(tensor=4).ranks] == [0.25] * 4
    assert [PARTS.head_share(rank) for rank in Topology(tensor=4, data=4).ranks] == [0.25] * 4


def test_what_is_split_alike_is_added_up() -> None:
    assert merged((*WEIGHTS, *WEIGHTS[:2])) == (
        SplitWeights(layers=(0,), split="columns", outputs=100, num_bytes=2000),
        SplitWeights(layers=(0, 1), num_bytes=14),
        *WEIGHTS[2:],
    )
