"""The parts that each rank holds of a model's weights, and of the activations of a token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pypto_serving.parallel.topology import PANEL, Rank

Split = Literal["whole", "heads", "kv_heads", "attention", "columns", "experts"]
"""How ranks split a matrix: not at all, by heads, by outputs, or by experts and the outputs of each.

Matrices of attention are split by heads or outputs; where ranks split its rows, each has them whole.
"""


class SplitWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that ranks split in one way.

    layers: layers whose stages hold them. The embedding is with the first layer, the output layer with the last one.
    outputs, unit: outputs of each matrix, and how many stay together, where outputs are split.
    """

    layers: tuple[int, ...]
    split: Split = "whole"
    outputs: int = 0
    unit: int = PANEL
    num_bytes: int


class TokenBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the activations of a token on the kernels.

    whole: of each rank.
    split: of all ranks of a stage together.
    attention: of all ranks of a stage together, unless they split its rows: then of each, beside its share of x.
    passed: of x, which a stage hands on.
    """

    whole: int = 0
    split: int = 0
    attention: int = 0
    passed: int = 0

    def held(self, rank: Rank, slots: int) -> int:
        """Count those of `rank` with `slots` steps in flight. Memory of two processes counts half for each."""
        topology = rank.topology
        neighbours = (not rank.embeds) + (not rank.projects)
        divided = self.split + self.passed * slots * neighbours // 2
        if topology.data == 1:
            return self.whole + (divided + self.attention) // topology.tensor
        return self.whole + self.attention + self.passed + divided // topology.tensor


class ModelParts(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks split of a model; without experts, `num_experts` is 0."""

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
        """Return the rank's part of all query heads, or of all rows."""
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
    """Add up the weights that are split alike."""
    sizes: dict[SplitWeights, int] = {}
    for one in weights:
        alike = msgspec.structs.replace(one, num_bytes=0)
        sizes[alike] = sizes.get(alike, 0) + one.num_bytes
    return tuple(msgspec.structs.replace(alike, num_bytes=size) for alike, size in sizes.items())
