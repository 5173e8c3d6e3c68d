"""Ranks: sizes that a model and a backend can have, where they run, and their memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import ModelParts, NumaNode, Placement, SplitWeights, Topology
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import make_options
from pypto_serving.setup.ranks import LEADER_BYTES, RANK_BYTES, RankWorkspace, plan_ranks
from pypto_serving.setup.resolver import Resolved
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.start import SECRET_VARIABLE
from tests.configs import change_config
from tests.setup.small import MIB, WITH_KERNELS, make_model, make_resolved, setting

WEIGHTS = (
    SplitWeights(layers=(0,), split="columns", outputs=1024, num_bytes=512 * MIB),
    SplitWeights(layers=(1,), split="heads", num_bytes=256 * MIB),
    SplitWeights(layers=(0, 1), num_bytes=8 * MIB),
)
DENSE = ModelParts(num_layers=2, num_heads=8, num_kv_heads=2, hidden_size=64, weights=WEIGHTS)
IN_TORCH = msgspec.structs.replace(DENSE, num_experts=6, weights=(SplitWeights(layers=(0,), num_bytes=64 * MIB),))
SPARSE = msgspec.structs.replace(DENSE, num_experts=6)
TWO_NODES = msgspec.structs.replace(WITH_KERNELS, nodes=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))))


def model_of(parts: ModelParts) -> ModelSpec:
    return make_model(needs_torch="", packed_bytes=776 * MIB, parts=parts, torch_parts=IN_TORCH)


def resolved_of(parts: ModelParts = DENSE, facts: HostFacts = TWO_NODES, /, **options: Any) -> Resolved:
    return make_resolved(model_of(parts), facts, **options)


def test_one_rank_by_default() -> None:
    resolved = resolved_of()
    assert resolved.engine.parallel.topology == Topology() and resolved.ranks == ()
    assert resolved.engine.parallel.placement(0) == Placement(num_threads=4)
    assert setting(resolved, "tensor-parallel-size") == (1, "default")
    assert setting(resolved, "join-secret-file") == (SECRET_VARIABLE, "default")


def test_ranks_are_placed_on_nodes() -> None:
    engine = resolved_of(tensor_parallel_size=2).engine
    assert engine.parallel.topology == Topology(tensor=2)
    assert engine.parallel.placement(0) == Placement(cpus=(0, 1), node=0, num_threads=2)
    assert engine.parallel.placement(1) == Placement(cpus=(2, 3), node=1, num_threads=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineConfig) == engine


def test_auto_is_a_rank_for_each_node() -> None:
    resolved = resolved_of(tensor_parallel_size="auto")
    assert resolved.engine.parallel.topology == Topology(tensor=2)
    assert "one for each NUMA node" in setting(resolved, "tensor-parallel-size")[1]


def test_auto_counts_the_nodes_of_each_replica() -> None:
    resolved = resolved_of(tensor_parallel_size="auto", data_parallel_size=2)
    assert [engine.parallel.topology for engine in resolved.engines] == [Topology(), Topology()]
    assert [engine.parallel.placement(0).node for engine in resolved.engines] == [0, 1]


@pytest.mark.parametrize(
    ("parts", "facts", "options", "why"),
    [
        (DENSE, WITH_KERNELS, {}, "NUMA node"),
        (DENSE, TWO_NODES, {"backend": "null"}, "this backend has no ranks"),
        (msgspec.structs.replace(DENSE, num_heads=1, num_kv_heads=1), TWO_NODES, {}, "NUMA node"),
    ],
)
def test_auto_is_one_rank_where_there_can_be_no_more(
    parts: ModelParts, facts: HostFacts, options: dict[str, Any], why: str
) -> None:
    resolved = resolved_of(parts, facts, tensor_parallel_size="auto", **options)
    size, reason = setting(resolved, "tensor-parallel-size")
    assert (size, resolved.engine.parallel.topology) == (1, Topology())
    assert reason.startswith("given by --tensor-parallel-size: ") and why in reason


def test_experts_are_split_among_groups_of_ranks() -> None:
    assert resolved_of(SPARSE, tensor_parallel_size=4, expert_parallel_size=2).engine.parallel.topology == Topology(
        4, 1, 2
    )


@pytest.mark.parametrize(("data", "expert"), [(2, 2), (4, 2)])
def test_data_parallel_ranks_share_the_experts_of_one_replica(data: int, expert: int) -> None:
    (engine,) = resolved_of(SPARSE, data_parallel_size=data, expert_parallel_size=expert).engines
    assert engine.parallel.topology == Topology(tensor=data, expert=expert, data=data)
    assert len(engine.parallel.placements) == data


def test_replicas_of_tensor_parallel_ranks_have_experts_of_their_own() -> None:
    engines = resolved_of(SPARSE, data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=2).engines
    assert [engine.parallel.topology for engine in engines] == [Topology(tensor=2, expert=2)] * 2


def test_ranks_that_share_rows_share_the_kv_cache() -> None:
    resolved = resolved_of(SPARSE, data_parallel_size=2, expert_parallel_size=2)
    for rank in resolved.ranks:
        assert (rank.rows, rank.heads) == (2, (0, 8)) and len(range(*rank.experts)) == 3
        assert rank.weight_bytes == (256 + 256 + 8) * MIB
        assert rank.kv_bytes == resolved.memory.kv_bytes // 2


TP, PP, EP = "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"
IN_TORCH_ONLY = "torch has tensor and expert parallelism on one host only, and --kernels is torch; drop it"
DP, JOIN = "data_parallel_size", {"join_address": "10.0.0.1:7000"}
REFUSED: list[tuple[ModelParts, dict[str, Any], str]] = [
    (DENSE, {TP: 0}, "--tensor-parallel-size is 0, but must be a whole number from 1 to 1024, or auto"),
    (DENSE, {TP: "all"}, "--tensor-parallel-size is all, but must be a whole number from 1 to 1024, or auto"),
    (DENSE, {EP: "auto"}, "--expert-parallel-size is auto, but must be a whole number from 1 to 1024"),
    (DENSE, {TP: 9}, "--tensor-parallel-size is 9, but the model has 8 query heads; give at most 8"),
    (DENSE, {PP: 2, "backend": "null"}, "--pipeline-parallel-size is 2, but this backend has no pipeline stages"),
    (DENSE, {PP: 99}, "--pipeline-parallel-size is 99, but the model has"),
    (DENSE, {TP: 2, EP: 2}, "--expert-parallel-size is 2, but the model has no experts; drop it"),
    (SPARSE, {TP: 8, EP: 8}, "--expert-parallel-size is 8, but the model has 6 experts; give at most 6"),
    (SPARSE, {TP: 4, EP: 3}, "--expert-parallel-size is 3, but expert groups are equal parts of the ranks that split"),
    (SPARSE, {TP: 4, EP: 3}, "and --tensor-parallel-size is 4; give 2, 4 or --tensor-parallel-size 12"),
    (SPARSE, {EP: 2}, "-size is 1; give --tensor-parallel-size 2 or --data-parallel-size 2"),
    (SPARSE, {EP: 4, DP: 1}, "-size is 1; give --tensor-parallel-size 4 or --data-parallel-size 4"),
    (SPARSE, {DP: 4, EP: 3}, "and --data-parallel-size is 4; give 2, 4 or --data-parallel-size 12"),
    (SPARSE, {DP: 2, EP: 7}, "--expert-parallel-size is 7, but the model has 6 experts; give at most 6"),
    (DENSE, {DP: 2, EP: 2}, "--expert-parallel-size is 2, but the model has no experts; drop it"),
    (SPARSE, {DP: 2, EP: 2, "backend": "null"}, "--expert-parallel-size is 2, but this backend has no expert groups"),
    (SPARSE, {TP: 2, "backend": "null"}, "--tensor-parallel-size is 2, but this backend has no ranks that split a"),
    (DENSE, {PP: 2, "kernels": "torch"}, f"--pipeline-parallel-size is 2, but {IN_TORCH_ONLY}"),
    (SPARSE, {DP: 2, EP: 2, "kernels": "torch"}, f"--data-parallel-size is 2, but {IN_TORCH_ONLY}"),
    (DENSE, JOIN, "but one rank runs on one host; give --tensor-parallel-size 2, or drop it"),
    (
        DENSE,
        {DP: 2, **JOIN},
        "--join-address is 10.0.0.1:7000, but --data-parallel-size is 2, and that is for one host; give "
        "--tensor-parallel-size 2 or --pipeline-parallel-size 2 instead, which two hosts can share, or drop "
        "--join-address",
    ),
    (SPARSE, {DP: 2, EP: 2, **JOIN}, "but --data-parallel-size is 2, and that is for one host; give --tensor"),
    (DENSE, {TP: 2, "join_address": "here:0"}, "--join-address is here:0, but must be an address and a port, such as"),
    (DENSE, {TP: 2, "join_secret_file": "key"}, "--join-secret-file has no effect without join-address; drop it"),
]


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {TP: "auto"}, {TP: "auto", DP: 2}])
def test_data_parallel_ranks_are_proposed_where_there_can_be_any(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved_of(SPARSE, WITH_KERNELS, expert_parallel_size=2, **options)
    assert str(caught.value).endswith("-size is 1; give --tensor-parallel-size 2")


@pytest.mark.parametrize(("parts", "options", "message"), REFUSED)
def test_sizes_that_cannot_be_are_refused_in_one_line(parts: ModelParts, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved_of(parts, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torch_has_ranks_with_the_weights_that_it_holds() -> None:
    resolved = resolved_of(SPARSE, tensor_parallel_size=2, expert_parallel_size=2, kernels="torch")
    assert resolved.engine.parallel.topology == Topology(tensor=2, expert=2)
    assert [rank.weight_bytes for rank in resolved.ranks] == [64 * MIB] * 2
    assert min(rank.workspace_bytes for rank in resolved.ranks) > 200 * MIB


def test_torch_is_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef")
    with pytest.raises(ConfigError, match=f"--join-address is 127.0.0.1:1, but {IN_TORCH_ONLY}"):
        resolved_of(tensor_parallel_size=2, join_address="127.0.0.1:1", kernels="torch")


def test_short_names() -> None:
    options = make_options({"tp": "2", "ep": 1}, {"pp": 1}, "a.yaml")
    assert (options.tensor_parallel_size, options.expert_parallel_size, options.pipeline_parallel_size) == (2, 1, 1)
    with pytest.raises(ConfigError, match="tp and tensor_parallel_size are the same option"):
        make_options({"tp": 2, "tensor_parallel_size": 2}, as_arguments=True)


def test_stages_share_the_kv_cache_by_layers() -> None:
    resolved, model = resolved_of(tensor_parallel_size=2), model_of(DENSE)
    engine = change_config(resolved.engine, topology=Topology(pipeline=2))
    first, last = plan_ranks(engine, model, resolved.memory, workspace())
    assert (first.layers, last.layers) == ((0, 1), (1, 2))
    assert (first.weight_bytes, last.weight_bytes) == (520 * MIB, 264 * MIB)
    assert first.kv_bytes == last.kv_bytes == resolved.memory.kv_bytes // 2


def test_ranks_that_share_cpus_are_warned_of() -> None:
    assert resolved_of(tensor_parallel_size=4).warnings == ()
    (warning,) = resolved_of(tensor_parallel_size=8).warnings
    assert warning == "8 ranks have 4 CPUs: those that share one wait for each other"


def test_memory_of_ranks() -> None:
    alone, resolved = resolved_of(), resolved_of(tensor_parallel_size=2)
    memory, ranks = resolved.memory, resolved.ranks
    assert [rank.weight_bytes for rank in ranks] == [(256 + 128 + 8) * MIB] * 2
    assert memory.weight_bytes == alone.memory.weight_bytes + 8 * MIB == sum(rank.weight_bytes for rank in ranks)
    assert sum(rank.workspace_bytes + rank.scoring_bytes for rank in ranks) < memory.workspace_bytes
    assert ranks[0].workspace_bytes > ranks[1].workspace_bytes > 0
    assert [rank.kv_bytes for rank in ranks] == [memory.kv_bytes // 2] * 2
    assert [(rank.heads, rank.kv_heads, rank.columns, rank.experts) for rank in ranks] == [
        ((0, 4), (0, 1), (0, 32), (0, 0)),
        ((4, 8), (1, 2), (32, 64), (0, 0)),
    ]
    assert [(rank.cpus, rank.node, rank.num_threads, rank.layers) for rank in ranks] == [
        ((0, 1), 0, 2, (0, 2)),
        ((2, 3), 1, 2, (0, 2)),
    ]


def workspace(**changes: Any) -> RankWorkspace:
    """Ranks with as many logits for sampling as for scoring."""
    sizes = {"activation_bytes": 0, "logits_bytes": 24 * MIB, "scored_bytes": 24 * MIB, "position_bytes": 0}
    other = {"torch": False, "row_bytes": MIB, "slots": 2, "step_tokens": 1}
    return RankWorkspace(**sizes | other | changes)


@pytest.mark.parametrize(
    ("topology", "logits"),
    [
        (Topology(tensor=2), [12 + 6, 6]),
        (Topology(tensor=4), [6 + 9, 3, 3, 3]),
        (Topology(tensor=2, hosts=2), [24, 12]),
        (Topology(pipeline=2), [24, 24 + 24]),
        (Topology(pipeline=2, hosts=2), [48, 24 + 48]),
        (Topology(tensor=2, pipeline=2), [24, 0, 12 + 12, 12 + 12]),
    ],
)
def test_logits_of_ranks(topology: Topology, logits: list[int]) -> None:
    """The leader reads what ranks of the last stage write; either has half of what both use, on one host."""
    ranks = topology.ranks
    assert [workspace().scoring_bytes(rank) // MIB for rank in ranks] == logits
    with_logits, without = (
        [w.num_bytes(rank, DENSE) for rank in ranks] for w in (workspace(), workspace(logits_bytes=0))
    )
    assert [(more - less) // MIB for more, less in zip(with_logits, without, strict=True)] == logits
    leads = MIB + LEADER_BYTES - RANK_BYTES
    assert [size - min(without) for size in without] == [leads] + [0] * (len(ranks) - 1)


def test_each_rank_has_tables_of_positions_and_the_leader_rows() -> None:
    ranks = Topology(tensor=2).ranks
    sizes, without = (
        [w.num_bytes(rank, DENSE) for rank in ranks] for w in (workspace(position_bytes=MIB), workspace(row_bytes=0))
    )
    assert [more - less for more, less in zip(sizes, without, strict=True)] == [2 * MIB, MIB]


def test_rows_of_a_pipeline_sample_in_different_steps() -> None:
    """Logits of the others are planned with those of prompts."""
    apart, together = (resolved_of(pipeline_parallel_size=2, max_num_seqs=n).ranks for n in (128, 64))
    logits = 4 * model_of(DENSE).vocab_size
    assert apart[1].workspace_bytes - together[1].workspace_bytes == 32 * logits * 2
    assert apart[1].scoring_bytes - together[1].scoring_bytes == 32 * logits * 2


def test_logits_of_prompts_are_apart() -> None:
    few, many = (resolved_of(tensor_parallel_size=2, max_num_seqs=n).ranks for n in (1, 65))
    assert [rank.scoring_bytes for rank in few] == [rank.scoring_bytes for rank in many]
    assert all(rank.scoring_bytes > 0 for rank in few)
    assert all(more.workspace_bytes > less.workspace_bytes for less, more in zip(few, many, strict=True))


def test_too_little_memory_counts_all_ranks() -> None:
    little = msgspec.structs.replace(TWO_NODES, available_bytes=1500 * MIB)
    assert resolved_of(DENSE, little).memory.total_bytes <= 1500 * MIB
    with pytest.raises(ConfigError, match="too little memory"):
        resolved_of(DENSE, little, tensor_parallel_size=8)
