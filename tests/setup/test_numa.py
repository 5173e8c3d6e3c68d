"""NUMA nodes, read from made-up trees of sysfs, and the CPUs that ranks get of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.parallel.topology import NumaNode, place_ranks
from pypto_serving.setup.host import NODES, read_nodes

EIGHT = range(8)
TWO = (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7)))


def make_nodes(
    root: Path,
    cpus: Mapping[int, str],
    *,
    online: str = "0-1",
    has_memory: str = "0-1",
    distances: Mapping[int, str] | None = None,
    memory_allowed: str = "",
) -> Path:
    """Write what Linux says of nodes with these lists of CPUs."""
    folder = root / NODES
    folder.mkdir(parents=True)
    (folder / "online").write_text(f"{online}\n")
    (folder / "has_memory").write_text(f"{has_memory}\n")
    for node, listed in cpus.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{listed}\n")
        (folder / f"node{node}" / "distance").write_text(f"{(distances or {}).get(node, '10 21')}\n")
    if memory_allowed:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{memory_allowed}\n")
    return root


def test_two_nodes(tmp_path: Path) -> None:
    assert read_nodes(EIGHT, make_nodes(tmp_path, {0: "0-3", 1: "4-7"})) == TWO


def test_cpus_of_a_node_need_not_follow_each_other(tmp_path: Path) -> None:
    nodes = read_nodes(EIGHT, make_nodes(tmp_path, {0: "0-1,4-5", 1: "2,3,6-7"}))
    assert nodes == (NumaNode(0, (0, 1, 4, 5)), NumaNode(1, (2, 3, 6, 7)))


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    root = make_nodes(tmp_path, {0: "0-3", 1: "4-7"})
    assert read_nodes({1, 5, 6}, root) == (NumaNode(0, (1,)), NumaNode(1, (5, 6)))
    assert read_nodes({6, 7}, root) == (NumaNode(1, (6, 7)),)


def test_a_node_that_is_offline_is_none(tmp_path: Path) -> None:
    root = make_nodes(tmp_path, {0: "0-7", 1: "4-7"}, online="0", has_memory="0")
    assert read_nodes(EIGHT, root) == (NumaNode(0, tuple(EIGHT)),)


def test_memory_without_cpus_is_no_place_for_a_rank(tmp_path: Path) -> None:
    assert read_nodes(EIGHT, make_nodes(tmp_path, {0: "0-7", 1: ""})) == (NumaNode(0, tuple(EIGHT)),)


def test_cpus_without_memory_go_to_the_nearest_node(tmp_path: Path) -> None:
    distances = {0: "10 16 32 32", 1: "16 10 32 32", 2: "32 32 10 16", 3: "32 32 16 10"}
    cpus = {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"}
    root = make_nodes(tmp_path, cpus, online="0-3", has_memory="0,2", distances=distances)
    assert read_nodes(EIGHT, root) == (NumaNode(0, (0, 1, 2, 3)), NumaNode(2, (4, 5, 6, 7)))


def test_a_node_whose_memory_a_cpuset_forbids_has_none(tmp_path: Path) -> None:
    root = make_nodes(tmp_path, {0: "0-3", 1: "4-7"}, memory_allowed="1")
    assert read_nodes(EIGHT, root) == (NumaNode(1, tuple(EIGHT)),)


@pytest.mark.parametrize("online", [None, "", "nonsense", "0-x,x-3"])
def test_a_system_that_tells_of_no_nodes_is_one(tmp_path: Path, online: str | None) -> None:
    if online is not None:
        make_nodes(tmp_path, {}, online=online, has_memory="")
    assert read_nodes({3, 1}, tmp_path) == (NumaNode(0, (1, 3)),)


def test_this_machine_has_its_allowed_cpus_once() -> None:
    allowed = set(range(1024))
    nodes = read_nodes(allowed)
    cpus = [cpu for node in nodes for cpu in node.cpus]
    assert cpus and len(cpus) == len(set(cpus))


def test_each_node_has_a_rank() -> None:
    left, right = place_ranks(TWO, 2, 8)
    assert (left.node, left.cpus, left.num_threads) == (0, (0, 1, 2, 3), 4)
    assert (right.node, right.cpus, right.num_threads) == (1, (4, 5, 6, 7), 4)


def test_nodes_of_different_sizes_keep_their_cpus() -> None:
    uneven = (NumaNode(0, (0,)), NumaNode(1, (1, 2, 3)))
    places = place_ranks(uneven, 2, 4)
    assert [(place.node, place.cpus, place.num_threads) for place in places] == [(0, (0,), 1), (1, (1, 2, 3), 2)]


def test_ranks_that_share_a_node_split_its_cpus_in_order() -> None:
    assert [place.cpus for place in place_ranks(TWO, 4, 8)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [place.cpus for place in place_ranks(TWO[:1], 2, 4)] == [(0, 1), (2, 3)]


def test_ranks_that_nodes_cannot_share_equally_split_all_cpus() -> None:
    assert [(place.node, place.cpus) for place in place_ranks(TWO, 3, 8)] == [
        (0, (0, 1, 2)),
        (None, (3, 4, 5)),
        (1, (6, 7)),
    ]


def test_given_threads_are_divided() -> None:
    assert [place.num_threads for place in place_ranks(TWO, 2, 5)] == [3, 2]
    assert [place.num_threads for place in place_ranks(TWO, 4, 1)] == [1, 1, 1, 1]


def test_ranks_share_cpus_where_there_are_too_few() -> None:
    assert [place.cpus for place in place_ranks((NumaNode(0, (2, 5)),), 4, 2)] == [(2,), (2,), (5,), (5,)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 40))
def test_all_cpus_are_used_and_none_is_idle(sizes: list[int], num_ranks: int, num_threads: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [
        NumaNode(i, tuple(range(start, start + size)))
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    places = place_ranks(nodes, num_ranks, num_threads)
    cpus = [cpu for place in places for cpu in place.cpus]
    assert len(places) == num_ranks and all(place.cpus and place.num_threads for place in places)
    if num_ranks <= min(sizes):
        assert sorted(cpus) == list(range(sum(sizes)))
    for place in places:
        assert place.node is None or set(place.cpus) <= set(nodes[place.node].cpus)
    assert all(1 <= place.num_threads <= len(place.cpus) for place in places)
    assert sum(place.num_threads for place in places) <= max(num_threads, num_ranks)
