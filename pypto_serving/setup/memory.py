"""The memory plan: how many blocks each KV group gets, and what the rest of the process needs beside them.

Every group gets, in this order, as long as memory lasts:

    1 null block
    what one sequence of `max_model_len` tokens holds, with whole steps of it in flight
    windows and states: what `max_num_seqs` sequences that decode hold, but not from more than half of the memory
    the rest as in a lower tier: history of N tokens, and for windows and states the checkpoints of N tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.rules import MAX_KV_BYTES
from pypto_serving.types.kv import (
    CHECKPOINT_TOKENS,
    KVCacheGroupSpec,
    max_live_blocks,
    publication_lag,
    resume_step,
)
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.tier import TierConfig
from pypto_serving.util import format_size

PROCESS_BYTES = 512 << 20
"""Resident memory of the API process, the core and the worker beside weights, KV and activations."""

MAX_SLOT = 2**31
"""Slots, block id * block_size + offset, are int32."""


class BackendDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults that depend on the device. A `simulated` device has no weights and takes no memory."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    depth: int = 1
    simulated: bool = False


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one KV group gets in one tier: `num_blocks` with the null block of the device.

    `first_blocks` of them are for one sequence of full length and the steps in flight, `more_blocks` for each more.
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
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Source tokens that the usable blocks hold; on the device, one is the null block."""
        return (self.num_blocks - (self.tier == "device")) * self.block_tokens

    @property
    def num_sequences(self) -> float:
        """Sequences of full length that fit at once on the device."""
        return 1 + (self.num_blocks - 1 - self.first_blocks) / self.more_blocks


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where `available_bytes` go.

    `lower` are the groups in tiers below the device, of which host memory is taken from `available_bytes` too.
    """

    groups: tuple[GroupPlan, ...]
    lower: tuple[GroupPlan, ...] = ()
    weight_bytes: int
    workspace_bytes: int
    available_bytes: int

    @property
    def kv_bytes(self) -> int:
        return sum(group.total_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.kv_bytes + self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of the host tier."""
        return sum(group.total_bytes for group in self.lower if group.tier == "host")

    @property
    def num_sequences(self) -> float:
        """Sequences of full length that fit at once."""
        return min(group.num_sequences for group in self.groups)

    def share(self, max_num_seqs: int, model_len: int) -> tuple[int, int]:
        """As many sequences as fit at once, at most `max_num_seqs`, and the tokens that each of them may have then."""
        history = [g for g in self.groups if g.keeps_history]
        tails = [g for g in self.groups if not g.keeps_history]
        count = min([max_num_seqs, *(int(g.num_sequences) for g in tails), *(g.num_blocks - 1 for g in history)])
        return count, min([model_len, *((g.num_blocks - 1) // count * g.block_tokens for g in history)])


def max_sequence_bytes(groups: Sequence[KVCacheGroupSpec], model_len: int, step_tokens: int) -> int:
    """Bytes of the null blocks and of one sequence of `model_len` tokens, `step_tokens` of them not settled."""
    live = max_live_blocks(groups, model_len, step_tokens)
    return sum((1 + blocks) * group.block_bytes for blocks, group in zip(live, groups, strict=True))


def tail_bytes(groups: Sequence[KVCacheGroupSpec], model_len: int, decode_tokens: int) -> int:
    """Bytes of windows and states that one sequence holds while it decodes."""
    live = max_live_blocks(groups, model_len, decode_tokens)
    return sum(blocks * g.block_bytes for blocks, g in zip(live, groups, strict=True) if not g.keeps_history)


def num_beside(kv_bytes: int, tails: int, max_num_seqs: int) -> int:
    """Sequences beside the first that get `tails` bytes of windows and states each, from at most half of `kv_bytes`."""
    return min(max_num_seqs - 1, kv_bytes // 2 // tails) if tails else 0


def plan_groups(
    groups: Sequence[KVCacheGroupSpec],
    kv_bytes: int,
    model_len: int,
    step_tokens: int,
    decode_tokens: int,
    max_num_seqs: int,
) -> tuple[GroupPlan, ...]:
    """Share `kv_bytes` out among the groups, for at most `max_num_seqs` full sequences.

    Of a sequence up to `step_tokens` are computed and not settled, `decode_tokens` of each further one beside it.
    `kv_bytes` must hold `max_sequence_bytes`; the plan never takes more than `kv_bytes`.
    """
    first = max_live_blocks(groups, model_len, step_tokens)
    more = max_live_blocks(groups, model_len, decode_tokens)
    per_token = blocks_per_token(groups)
    cost = sum((blocks * group.block_bytes for blocks, group in zip(per_token, groups, strict=True)), Fraction())
    tails = tail_bytes(groups, model_len, decode_tokens)
    spare = kv_bytes - max_sequence_bytes(groups, model_len, step_tokens)
    num_more = min(num_beside(kv_bytes, tails, max_num_seqs), spare // max(1, tails))
    longest = Fraction(max_num_seqs * -(-model_len // resume_step(groups)) * resume_step(groups))
    num_tokens = min(longest, (spare - num_more * tails) / cost) if cost else longest

    def usable(g: int) -> int:
        cached = int(num_tokens * per_token[g])
        wanted = min(cached, (max_num_seqs - 1) * more[g]) if groups[g].keeps_history else num_more * more[g] + cached
        return min(first[g] + wanted, MAX_SLOT // groups[g].block_size - 1)

    return tuple(
        msgspec.structs.replace(group_plan(group, "device", 1 + usable(g)), first_blocks=first[g], more_blocks=more[g])
        for g, group in enumerate(groups)
    )


def blocks_per_token(groups: Sequence[KVCacheGroupSpec]) -> tuple[Fraction, ...]:
    """Blocks of each group that cached sequences take for each of their tokens.

    Of window and state groups the tails at checkpoints are kept, which are counted twice as often as they come in one
    sequence, because each prompt and turn ends with one too.
    """
    step = resume_step(groups)
    return tuple(
        Fraction(1, group.block_size)
        if group.keeps_history
        else Fraction(2 * group.tail_blocks(step), CHECKPOINT_TOKENS)
        for group in groups
    )


def tier_slots(groups: Sequence[KVCacheGroupSpec], size_bytes: int) -> tuple[int, ...]:
    """Blocks of each group that a lower tier of `size_bytes` keeps. A block takes a multiple of 4096 bytes."""
    per_token = blocks_per_token(groups)
    strides = [-(-group.block_bytes // 4096) * 4096 for group in groups]
    num_tokens = size_bytes / sum(blocks * stride for blocks, stride in zip(per_token, strides, strict=True))
    least = [0 if group.keeps_history else 1 for group in groups]
    return tuple(max(int(num_tokens * blocks), few) for blocks, few in zip(per_token, least, strict=True))


def group_plan(group: KVCacheGroupSpec, tier: str, num_blocks: int) -> GroupPlan:
    """What a group gets in a tier."""
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


def plan_tier(groups: Sequence[KVCacheGroupSpec], tier: TierConfig) -> tuple[GroupPlan, ...]:
    """What each group gets in a lower tier."""
    return tuple(group_plan(group, tier.tier, slots) for group, slots in zip(groups, tier.num_slots, strict=True))


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Largest n in [1, high] with fits(n), or 0; `fits` must not become true again once false."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def workspace_bytes(model: ModelSpec, max_num_seqs: int, step_tokens: int) -> int:
    """Estimate of activations, logits and processes.

    A layer of width h has about 12 h^2 parameters and keeps about 32 h float32 values per token alive; logits
    exist twice in float32, for the rows that sample.
    """
    width = int((model.num_parameters / (12 * max(1, model.num_layers))) ** 0.5)
    rows = min(max_num_seqs, step_tokens)
    return PROCESS_BYTES + 4 * (32 * width * step_tokens + 2 * model.vocab_size * rows)


class MemoryPlanner:
    """Decides the longest sequence and the KV memory; each figure is a function of the longest length.

    Raises ConfigError naming the option to change.
    """

    def __init__(
        self,
        options: Options,
        model: ModelSpec,
        host: HostFacts,
        defaults: BackendDefaults,
        max_num_seqs: int,
    ) -> None:
        self.options = options
        self.model = model
        self.available_bytes = host.available_bytes
        self.defaults = defaults
        self.max_num_seqs = max_num_seqs
        self.chunked = options.chunked_prefill is not False
        self.weight_bytes = 0 if defaults.simulated else model.weight_bytes
        self.host_bytes = self._host_bytes()

    def step_tokens(self, model_len: int) -> int:
        """The token budget of a step."""
        given = self.options.max_num_batched_tokens
        if given is not None:
            return given
        default = self.defaults.max_num_batched_tokens
        return default if self.chunked else max(default, model_len)

    def model_len(self) -> tuple[int, str]:
        """The longest sequence in tokens, and why."""
        self._check_room()
        limit, reason = self.model.max_position_embeddings, "the model's longest sequence"
        given = self.options.max_model_len
        if given is not None:
            self._check_given_len(given)
            return given, self.options.origin("max_model_len")
        budget = self.options.max_num_batched_tokens
        if not self.chunked and budget is not None and budget < limit:
            limit, reason = budget, "max-num-batched-tokens, because chunked prefill is off"
        best = largest(self._fits_beside_others, limit)
        if best < min(2, limit):
            best = largest(self._fits, limit)
        if best < min(2, limit):
            raise self._too_little(min(2, limit), 0)
        if best < limit:
            reason = f"the longest that fits the KV memory; the model allows {self.model.max_position_embeddings}"
        return best, reason

    def plan(self, model_len: int) -> tuple[MemoryPlan, str]:
        """The plan for sequences of up to `model_len` tokens, and why KV gets what it gets."""
        groups = plan_groups(
            self.model.kv_groups,
            self._kv_limit(model_len),
            model_len,
            self._unsettled(model_len, self.step_tokens(model_len)),
            self._unsettled(model_len, 1),
            self.max_num_seqs,
        )
        plan = MemoryPlan(
            groups=groups,
            weight_bytes=self.weight_bytes,
            workspace_bytes=self._workspace(model_len),
            available_bytes=self.available_bytes,
        )
        reason = self._kv_reason()
        if plan.num_sequences >= self.max_num_seqs:
            reason += f"; no more than {self.max_num_seqs} sequences of {model_len} tokens can use"
        return plan, reason

    def _unsettled(self, model_len: int, step_tokens: int) -> int:
        """Most tokens of one sequence, `step_tokens` a step, that are computed before the first of them is settled."""
        return min(model_len, step_tokens) * self.defaults.depth + publication_lag(self.model.kv_groups)

    def _workspace(self, model_len: int) -> int:
        if self.defaults.simulated:
            return 0
        positions = self.model.position_bytes * model_len
        return positions + workspace_bytes(self.model, self.max_num_seqs, self.step_tokens(model_len))

    def _room(self, model_len: int) -> int:
        """Bytes that weights and workspace leave for KV."""
        if self.defaults.simulated:
            return MAX_KV_BYTES
        return self.available_bytes - self.weight_bytes - self._workspace(model_len) - self.host_bytes

    def _host_bytes(self) -> int:
        """Bytes of the host tier."""
        given = self.options.kv_host_memory
        if given is None:
            return 0
        return int(given * self.available_bytes) if isinstance(given, float) else given

    def _kv_limit(self, model_len: int) -> int:
        """Bytes that KV may take, null blocks included."""
        given = self.options.kv_memory
        if given is None:
            return min(self._room(model_len), self.available_bytes) // 2
        return int(given * self.available_bytes) if isinstance(given, float) else given

    def _kv_needed(self, model_len: int) -> int:
        """Bytes of one sequence of `model_len` tokens, null blocks included."""
        unsettled = self._unsettled(model_len, self.step_tokens(model_len))
        return max_sequence_bytes(self.model.kv_groups, model_len, unsettled)

    def _fits(self, model_len: int) -> bool:
        return self._kv_needed(model_len) <= self._kv_limit(model_len) <= self._room(model_len)

    def _fits_beside_others(self, model_len: int) -> bool:
        limit = self._kv_limit(model_len)
        tails = tail_bytes(self.model.kv_groups, model_len, self._unsettled(model_len, 1))
        others = min((self.max_num_seqs - 1) * tails, limit // 2)
        return self._fits(model_len) and self._kv_needed(model_len) + others <= limit

    def _kv_reason(self) -> str:
        free, given = format_size(self.available_bytes), self.options.kv_memory
        if given is None:
            return f"half of {free} free" + ("" if self.defaults.simulated else " less weights and workspace")
        share = f": {given:g} of {free} free" if isinstance(given, float) else ""
        return self.options.origin("kv_memory") + share

    def _check_room(self) -> None:
        """Refuse what not even the shortest sequence leaves room for."""
        room, free = self._room(2), format_size(self.available_bytes)
        weights, workspace = format_size(self.weight_bytes), format_size(self._workspace(2))
        host = f", the host tier {format_size(self.host_bytes)}" if self.host_bytes else ""
        taken = f"weights take {weights}{host} and the workspace {workspace} of {free} free"
        if room <= 0:
            raise ConfigError(f"too little memory: {taken}; {self._how_to_shrink()}")
        asked = self._kv_limit(2)
        if asked > room:
            raise ConfigError(
                f"{self.options.label('kv_memory')} is {format_size(asked)}, but {taken}; "
                f"give at most {size_option(room)}"
            )

    def _how_to_shrink(self) -> str:
        if self.host_bytes:
            return "lower --kv-host-memory"
        if self.weight_bytes < self.available_bytes:
            return "lower --max-num-batched-tokens or --max-num-seqs, or free memory"
        smaller = "give --dtype bfloat16, " if self.model.dtype == "float32" else ""
        return f"{smaller}choose a smaller MODEL, or free memory"

    def _check_given_len(self, given: int) -> None:
        label, limit = self.options.label("max_model_len"), self.model.max_position_embeddings
        if given > limit:
            raise ConfigError(f"{label} is {given}, but the model's longest sequence is {limit}; give at most {limit}")
        budget = self.options.max_num_batched_tokens
        if not self.chunked and budget is not None and budget < given:
            raise ConfigError(
                f"{self.options.label('max_num_batched_tokens')} is {budget}, but without chunked prefill a "
                f"step holds a whole prompt, and {label} is {given}; give at least {given}, or --chunked-prefill"
            )
        if not self._fits(given):
            raise self._too_little(given, largest(self._fits, given))

    def _too_little(self, model_len: int, best: int) -> ConfigError:
        """The error for a length that does not fit; `best` is one that does, or 0."""
        need, limit = self._kv_needed(model_len), self._kv_limit(model_len)
        ways = [f"--max-model-len {best} or less"] if best >= 2 else []
        if need <= self._room(model_len):
            ways.append(f"--kv-memory {size_option(need, up=True)} or more")
        asked = self.options.max_model_len is not None
        length = f"--max-model-len {model_len}" if asked else f"{model_len} tokens, the shortest there is"
        return ConfigError(
            f"{self.options.label('kv_memory')} is {format_size(limit)}, too little for one sequence of "
            f"{length}, which needs {format_size(need)}; "
            f"give {' or '.join(ways) or 'a smaller MODEL or --block-size, or free memory'}"
        )


def size_option(num_bytes: int, *, up: bool = False) -> str:
    """A size that `--kv-memory` understands: at least `num_bytes` when rounded `up`, otherwise at most."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 100 * factor:
            return f"{-(-num_bytes // factor) if up else num_bytes // factor}{unit}"
    return str(num_bytes)
