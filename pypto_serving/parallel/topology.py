"""The ranks of one replica: the part of a model that each computes and holds, and its placement. Values only.

A replica is a pipeline of stages, each a range of layers, and every stage is a tensor group. The ranks of a tensor
group split each matrix by its outputs, never by its inputs. So no sum is split, and all sizes give the same bits.
The experts of a layer are split among expert groups inside the tensor group:

    --tp 4 --ep 2     rank 0    rank 1    rank 2    rank 3
    heads             0..7      8..15     16..23    24..31
    experts           0..63     0..63     64..127   64..127
    their columns     left      right     left      right

Attention can be split by rows instead: each rank then computes all heads for its rows. This splits no sum, either.

All parts are half-open ranges in rank order, without gaps, as equal as whole units allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from pypto_serving.util import ceil_div

PANEL = 32
"""Outputs per panel of packed weights."""
MOST_HOSTS = 2


class Topology(msgspec.Struct, frozen=True):
    """The numbers of ranks of one replica in each dimension. Raises ValueError for incompatible sizes.

    tensor: ranks that split the matrices of each layer.
    pipeline: stages that split the layers; each is a tensor group.
    expert: groups within a tensor group that split the experts.
    data: groups within a tensor group that split the rows of attention: 1, or one group per rank.
    hosts: machines that split the stages, or the ranks of the only stage.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data: int = 1
    hosts: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.expert, self.data) < 1:
            raise ValueError("sizes of a topology must be at least 1")
        if self.data not in (1, self.tensor):
            raise ValueError(f"{self.tensor} tensor ranks split rows among all of them or not at all, not {self.data}")
        if self.tensor % self.expert:
            raise ValueError(f"{self.tensor} tensor ranks cannot be split into {self.expert} expert groups")
        if not 1 <= self.hosts <= min(MOST_HOSTS, self._split_by_hosts):
            raise ValueError(f"{self.num_ranks} ranks cannot be split among {self.hosts} hosts")
        if self.hosts > 1 and self.data > 1:
            raise ValueError("ranks that split rows read the same KV cache, which two hosts do not have")

    @property
    def num_ranks(self) -> int:
        """Count the ranks of the replica."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Return all ranks, stage by stage; the first is the leader, which samples and answers."""
        return tuple(Rank(self, index) for index in range(self.num_ranks))

    def repeats_kv_heads(self, num_kv_heads: int) -> bool:
        """Return whether some ranks of a tensor group share a key and value head."""
        return num_kv_heads < self.tensor

    def on_host(self, host: int) -> tuple[Rank, ...]:
        """Return the ranks of one host; the leader is on host 0."""
        return tuple(rank for rank in self.ranks if rank.host == host)

    @property
    def hosts_split_layers(self) -> bool:
        """Return whether the ranks of each layer are on several hosts."""
        return self.hosts > 1 and self.pipeline == 1

    @property
    def connections(self) -> Mapping[str, tuple[int, int]]:
        """Return the connections of two hosts by name, each with the indices of its two ranks, host 0's first."""
        if self.hosts == 1:
            return {}
        first = self.on_host(1)[0].index
        if self.hosts_split_layers:
            return dict.fromkeys(("steps", "blocks", "exchange"), (0, first))
        stages = {"rows": (first - self.tensor, first), "logits": (0, self.num_ranks - self.tensor)}
        return dict.fromkeys(("steps", "blocks"), (0, first)) | stages

    @property
    def _split_by_hosts(self) -> int:
        return self.pipeline if self.pipeline > 1 else self.tensor


class Rank(msgspec.Struct, frozen=True):
    """One rank's position, and its parts of a model; the only rank of Topology() has the whole model.

    Raises ValueError for an index outside the topology.
    """

    topology: Topology = Topology()
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.topology.num_ranks:
            raise ValueError(f"{self.index} is no rank of {self.topology.num_ranks}")

    @property
    def leads(self) -> bool:
        """Return whether this rank packs steps, samples and answers."""
        return self.index == 0

    @property
    def stage(self) -> int:
        """Return the index of its stage in the pipeline."""
        return self.index // self.topology.tensor

    @property
    def tensor(self) -> int:
        """Return its index in the tensor group."""
        return self.index % self.topology.tensor

    @property
    def attention(self) -> Rank:
        """Return the rank whose attention weights it holds: itself or, if rows are split, a rank with all of them."""
        return Rank() if self.topology.data > 1 else self

    @property
    def host(self) -> int:
        """Return the index of its host."""
        topology = self.topology
        place, size = (self.stage, topology.pipeline) if topology.pipeline > 1 else (self.tensor, topology.tensor)
        return next(host for host in range(topology.hosts) if place in part(size, topology.hosts, host))

    @property
    def embeds(self) -> bool:
        """Return whether it is in the first stage, which embeds tokens."""
        return self.stage == 0

    @property
    def projects(self) -> bool:
        """Return whether it is in the last stage, which computes logits."""
        return self.stage == self.topology.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage."""
        return part(num_layers, self.topology.pipeline, self.stage)

    def heads(self, num_heads: int, num_kv_heads: int = 1) -> range:
        """Return its query heads: all heads of its key and value heads, or a part if ranks share a key and value head.

        `num_kv_heads` divides `num_heads`. Empty for some ranks if there are fewer heads than tensor ranks.
        """
        kept = self.kv_heads(num_kv_heads)
        group, size = num_heads // num_kv_heads, self.topology.tensor
        if not self.topology.repeats_kv_heads(num_kv_heads):
            return range(kept.start * group, kept.stop * group)
        first, last = (ceil_div(head * size, num_kv_heads) for head in (kept.start, kept.stop))
        inside = part(group, last - first, self.tensor - first)
        return range(kept.start * group + inside.start, kept.start * group + inside.stop)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return its key and value heads; if there are fewer than tensor ranks, several ranks share one."""
        if not self.topology.repeats_kv_heads(num_kv_heads):
            return part(num_kv_heads, self.topology.tensor, self.tensor)
        head = self.tensor * num_kv_heads // self.topology.tensor
        return range(head, head + 1)

    def writes_kv(self, num_kv_heads: int) -> bool:
        """Return whether it is the first of the ranks that have its key and value heads."""
        size = self.topology.tensor
        first = ceil_div(self.tensor * num_kv_heads // size * size, num_kv_heads)
        return self.tensor == first or not self.topology.repeats_kv_heads(num_kv_heads)

    def columns(self, num_columns: int, unit: int = PANEL) -> range:
        """Return its outputs of a matrix, perhaps none, in whole units; only the matrix's last unit may be shorter."""
        return columns(num_columns, unit, self.topology.tensor, self.tensor)

    def vocabulary(self, vocab_size: int) -> range:
        """Return its tokens of embedding and output layer."""
        return self.columns(vocab_size)

    def experts(self, num_experts: int) -> range:
        """Return the experts of its expert group."""
        return part(num_experts, self.topology.expert, self.tensor // self._sharers)

    def expert_columns(self, num_columns: int, unit: int = PANEL) -> range:
        """Return its outputs of a matrix of each of its experts, in whole units."""
        return columns(num_columns, unit, self._sharers, self.tensor % self._sharers)

    @property
    def _sharers(self) -> int:
        """Count the ranks of an expert group."""
        return self.topology.tensor // self.topology.expert


def part(count: int, num_parts: int, index: int) -> range:
    """Return part `index` of range(count), split into `num_parts`; the first parts may be larger by one."""
    least, larger = divmod(count, num_parts)
    start = index * least + min(index, larger)
    return range(start, start + least + (index < larger))


def columns(count: int, unit: int, num_parts: int, index: int) -> range:
    """Return part `index` of range(count), split into `num_parts` of whole units; the last unit may be shorter."""
    units = part(ceil_div(count, unit), num_parts, index)
    return range(min(count, units.start * unit), min(count, units.stop * unit))


Split = Literal["whole", "heads", "kv_heads", "attention", "columns", "experts"]
"""Ways to split a matrix over ranks: not at all, by heads, by outputs, or by experts and the outputs of each.

Matrices of attention are split by heads or outputs; if ranks split the rows of attention, each has the whole matrices.
"""


class SplitWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that ranks split in the same way.

    layers: layers whose stages hold them. The embedding belongs to the first layer, the output layer to the last one.
    outputs, unit: outputs of each matrix and, if outputs are split, how many stay together.
    """

    layers: tuple[int, ...]
    split: Split = "whole"
    outputs: int = 0
    unit: int = PANEL
    num_bytes: int


class TokenBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of activations per token in the CPU kernels.

    whole: in each rank.
    split: in all ranks of a stage together.
    attention: in all ranks of a stage together; if they split its rows, in each rank, in addition to its share of x.
    passed: of x, the hidden state, which a stage passes to the next.
    """

    whole: int = 0
    split: int = 0
    attention: int = 0
    passed: int = 0

    def held(self, rank: Rank, slots: int) -> int:
        """Count the bytes of `rank` with `slots` steps in flight. Memory shared by two processes counts half."""
        topology = rank.topology
        neighbours = (not rank.embeds) + (not rank.projects)
        divided = self.split + self.passed * slots * neighbours // 2
        if topology.data == 1:
            return self.whole + (divided + self.attention) // topology.tensor
        return self.whole + self.attention + self.passed + divided // topology.tensor


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model that ranks split; without experts, `num_experts` is 0."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    num_experts: int = 0
    weights: tuple[SplitWeights, ...] = ()
    token: TokenBytes = TokenBytes()

    def weight_bytes(self, rank: Rank) -> int:
        """Count the bytes of the weights that `rank` holds."""
        own = set(rank.layers(self.num_layers))
        return sum(self._held(weights, rank) for weights in self.weights if not own.isdisjoint(weights.layers))

    def head_share(self, rank: Rank) -> float:
        """Return the rank's share of all query heads, or of all rows."""
        heads = rank.attention.heads(self.num_heads, self.num_kv_heads)
        return len(heads) / self.num_heads / rank.topology.data

    def _held(self, weights: SplitWeights, rank: Rank) -> int:
        size, outputs, unit = weights.num_bytes, weights.outputs, weights.unit
        match weights.split:
            case "whole":
                return size
            case "heads":
                return size * len(rank.attention.heads(self.num_heads, self.num_kv_heads)) // self.num_heads
            case "kv_heads":
                return size * len(rank.attention.kv_heads(self.num_kv_heads)) // self.num_kv_heads
            case "attention":
                return size * len(rank.attention.columns(outputs, unit)) // outputs
            case "columns":
                return size * len(rank.columns(outputs, unit)) // outputs
            case "experts":
                cells = len(rank.experts(self.num_experts)) * len(rank.expert_columns(outputs, unit))
                return size * cells // (self.num_experts * outputs)


def merged(weights: Iterable[SplitWeights]) -> tuple[SplitWeights, ...]:
    """Sum the weights that are split in the same way."""
    sizes: dict[SplitWeights, int] = {}
    for one in weights:
        alike = msgspec.structs.replace(one, num_bytes=0)
        sizes[alike] = sizes.get(alike, 0) + one.num_bytes
    return tuple(msgspec.structs.replace(alike, num_bytes=size) for alike, size in sizes.items())


class NumaNode(msgspec.Struct, frozen=True):
    """The allowed CPUs of one NUMA node."""

    index: int
    cpus: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of a rank. Its memory lies on the node of the CPU that first writes to it.

    So `set_mempolicy`, which most containers forbid, is not needed, and a full node does not end the process.

    cpus: CPUs of its threads; empty for all that the process may use.
    node: NUMA node of all these CPUs, or None.
    num_threads: threads that compute; 0 for one per CPU.
    """

    cpus: tuple[int, ...] = ()
    node: int | None = None
    num_threads: int = 0


def place_ranks(nodes: Sequence[NumaNode], num_ranks: int, num_threads: int) -> tuple[Placement, ...]:
    """Give each rank CPUs and its part of `num_threads`: at least one thread, at most one per CPU.

    If possible, each node gets the same number of ranks; otherwise all CPUs are split in order. If there are fewer CPUs
    than ranks, ranks share CPUs.
    """
    each, rest = divmod(num_ranks, max(1, len(nodes)))
    if nodes and not rest:
        cpus = [_share(node.cpus, each, index) for node in nodes for index in range(each)]
    else:
        all_cpus = [cpu for node in nodes for cpu in node.cpus]
        cpus = [_share(all_cpus, num_ranks, index) for index in range(num_ranks)]
    threads = [len(part(num_threads, num_ranks, index)) for index in range(num_ranks)]
    return tuple(
        Placement(cpus=own, node=_node_of(nodes, own), num_threads=max(1, min(count, len(own) or count)))
        for own, count in zip(cpus, threads, strict=True)
    )


def _share(cpus: Sequence[int], count: int, index: int) -> tuple[int, ...]:
    """Return part `index` of `count` of the CPUs, or a single CPU if there are too few."""
    if len(cpus) < count:
        return tuple(cpus[index * len(cpus) // count :][:1])
    own = part(len(cpus), count, index)
    return tuple(cpus[own.start : own.stop])


def _node_of(nodes: Sequence[NumaNode], cpus: Sequence[int]) -> int | None:
    """Return the node that has all `cpus`, or None."""
    return next((node.index for node in nodes if cpus and set(cpus) <= set(node.cpus)), None)
