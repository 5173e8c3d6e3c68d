"""The memory plan: divide the bytes for KV among the groups, on the device and in lower tiers.

On the device, memory is assigned in this order, as long as it lasts:

1. the null block of every group
2. one sequence of `max_model_len` tokens, including its steps in flight; with tiers, 1/8 more for transfers
3. windows and states of the other `max_num_seqs` - 1 sequences while they decode, from at most half of the memory
4. the rest as in a lower tier: history of N tokens, and windows and states at the checkpoints of N tokens

If every group instead held the same number of longest sequences, DeepSeek V4 with 1 M tokens of context would have
window blocks for 30 requests, and history for 7 M tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from pypto_serving.types.kv import (
    KVCacheGroupSpec,
    max_live_blocks,
    resume_step,
)
from pypto_serving.types.tier import ALIGNMENT
from pypto_serving.util import ceil_div

MAX_SLOT = 2**31
"""Limit of slots, block id * block_size + offset, which are int32."""
TRANSFERRED_PART = 8
"""With lower tiers, add one block for every 8 blocks of the longest sequence."""


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV group in one tier; on the device, `num_blocks` includes the null block.

    first_blocks: blocks of one sequence of full length, with the steps in flight and blocks for transfers.
    more_blocks: blocks of each further sequence.
    """

    name: str
    kind: str
    tier: str
    num_layers: int
    block_tokens: int
    block_bytes: int
    keeps_history: bool
    num_blocks: int
    first_blocks: int = 0
    more_blocks: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Count the source tokens that fit; on the device, the null block holds none."""
        return (self.num_blocks - (self.tier == "device")) * self.block_tokens

    @property
    def num_sequences(self) -> float:
        """Estimate how many sequences of full length fit at once on the device."""
        return 1 + (self.num_blocks - 1 - self.first_blocks) / self.more_blocks


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The use of `available_bytes`. `lower` lists the groups in lower tiers.

    The host tier is part of these bytes unless they are a card's.
    """

    groups: tuple[GroupPlan, ...]
    lower: tuple[GroupPlan, ...] = ()
    weight_bytes: int
    workspace_bytes: int
    available_bytes: int
    on_card: bool = False

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV on the device."""
        return sum(group.total_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Return the bytes used of `available_bytes`."""
        host_bytes = 0 if self.on_card else self.host_bytes
        return self.weight_bytes + self.workspace_bytes + self.kv_bytes + host_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host tier."""
        return sum(group.total_bytes for group in self.lower if group.tier == "host")

    @property
    def num_sequences(self) -> float:
        """Estimate how many sequences of full length fit at once."""
        return min(group.num_sequences for group in self.groups)

    def share(self, max_num_seqs: int, model_len: int) -> tuple[int, int]:
        """Return how many sequences fit at once, at most `max_num_seqs`, and how many tokens each of them can have."""
        history = [g for g in self.groups if g.keeps_history]
        recent = [g for g in self.groups if not g.keeps_history]
        count = min([max_num_seqs, *(int(g.num_sequences) for g in recent), *(g.num_blocks - 1 for g in history)])
        return count, min([model_len, *((g.num_blocks - 1) // count * g.block_tokens for g in history)])


def first_blocks(groups: Sequence[KVCacheGroupSpec], model_len: int, step_tokens: int, tiered: bool) -> tuple[int, ...]:
    """Count the blocks of one sequence of `model_len` tokens, `step_tokens` of them not committed.

    With `tiered`, add 1/8 for blocks that transfers to and from lower tiers hold.
    """
    live = max_live_blocks(groups, model_len, step_tokens)
    return tuple(blocks + ceil_div(blocks, TRANSFERRED_PART) * tiered for blocks in live)


def max_sequence_bytes(
    groups: Sequence[KVCacheGroupSpec], model_len: int, step_tokens: int, tiered: bool = False
) -> int:
    """Count the bytes of all null blocks and of `first_blocks`."""
    first = first_blocks(groups, model_len, step_tokens, tiered)
    return sum((1 + blocks) * group.block_bytes for blocks, group in zip(first, groups, strict=True))


def resume_bytes(groups: Sequence[KVCacheGroupSpec], model_len: int, decode_tokens: int) -> int:
    """Count the bytes of windows and states that one decoding sequence holds."""
    live = max_live_blocks(groups, model_len, decode_tokens)
    return sum(blocks * g.block_bytes for blocks, g in zip(live, groups, strict=True) if not g.keeps_history)


def plan_groups(
    groups: Sequence[KVCacheGroupSpec],
    kv_bytes: int,
    model_len: int,
    step_tokens: int,
    decode_tokens: int,
    max_num_seqs: int,
    tiered: bool = False,
) -> tuple[GroupPlan, ...]:
    """Divide `kv_bytes` among the groups, for at most `max_num_seqs` full sequences.

    One sequence has up to `step_tokens` computed but uncommitted tokens, each further one up to `decode_tokens`.
    `kv_bytes` must hold `max_sequence_bytes`; the plan never takes more than `kv_bytes`.
    """
    first = first_blocks(groups, model_len, step_tokens, tiered)
    more = max_live_blocks(groups, model_len, decode_tokens)
    per_token = blocks_per_token(groups)
    cost = sum((blocks * group.block_bytes for blocks, group in zip(per_token, groups, strict=True)), Fraction())
    each = resume_bytes(groups, model_len, decode_tokens)
    spare = kv_bytes - max_sequence_bytes(groups, model_len, step_tokens, tiered)
    # Windows and states of further sequences take at most half of the memory.
    num_more = min(max_num_seqs - 1, kv_bytes // 2 // each, spare // each) if each else 0
    longest = Fraction(max_num_seqs * -(-model_len // resume_step(groups)) * resume_step(groups))
    num_tokens = min(longest, (spare - num_more * each) / cost) if cost else longest

    def usable(g: int) -> int:
        cached = int(num_tokens * per_token[g])
        wanted = min(cached, (max_num_seqs - 1) * more[g]) if groups[g].keeps_history else num_more * more[g] + cached
        return min(first[g] + wanted, MAX_SLOT // groups[g].block_size - 1)

    return tuple(
        msgspec.structs.replace(group_plan(group, "device", 1 + usable(g)), first_blocks=first[g], more_blocks=more[g])
        for g, group in enumerate(groups)
    )


def blocks_per_token(groups: Sequence[KVCacheGroupSpec]) -> tuple[Fraction, ...]:
    """Return the blocks of each group that a cached sequence takes per token."""
    step = resume_step(groups)
    return tuple(group.blocks_per_token(step) for group in groups)


def tier_slots(groups: Sequence[KVCacheGroupSpec], size_bytes: int) -> tuple[int, ...]:
    """Count the blocks of each group that a lower tier of `size_bytes` keeps; each takes a multiple of ALIGNMENT."""
    per_token = blocks_per_token(groups)
    strides = [ceil_div(group.block_bytes, ALIGNMENT) * ALIGNMENT for group in groups]
    num_tokens = size_bytes / sum(blocks * stride for blocks, stride in zip(per_token, strides, strict=True))
    least = [0 if group.keeps_history else 1 for group in groups]
    return tuple(max(int(num_tokens * blocks), few) for blocks, few in zip(per_token, least, strict=True))


def group_plan(group: KVCacheGroupSpec, tier: str, num_blocks: int) -> GroupPlan:
    """Describe the `num_blocks` blocks of a group in a tier."""
    return GroupPlan(
        name=group.name,
        kind=group.kind,
        tier=tier,
        num_layers=len({layer for tensor in group.tensors for layer in tensor.layers}),
        block_tokens=group.block_size,
        block_bytes=group.block_bytes,
        keeps_history=group.keeps_history,
        num_blocks=num_blocks,
    )
