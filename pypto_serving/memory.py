"""The memory plan: how many blocks each KV group gets, and what the rest of the process needs beside them.

Every group holds the same number of slots for sequences of `max_model_len` tokens:

    slot bytes   = sum over groups g of max_live_blocks[g] * block_bytes[g]
    blocks of g  = 1 null block + floor(slots * max_live_blocks[g])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.host import HostFacts
from pypto_serving.options import MAX_KV_BYTES, Options
from pypto_serving.types.kv import CHECKPOINT_TOKENS, KVCacheGroupSpec, publication_lag
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
    """What one KV group gets in one tier: `num_blocks` with the null block, `live_blocks` per sequence."""

    name: str
    kind: str
    tier: str
    num_layers: int
    block_tokens: int
    block_bytes: int
    num_blocks: int
    live_blocks: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Source tokens that the usable blocks hold; on the device, one is the null block."""
        return (self.num_blocks - (self.tier == "device")) * self.block_tokens


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where `available_bytes` go. `num_sequences`: sequences of full length that fit at once.

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
        return min((g.num_blocks - 1) / g.live_blocks for g in self.groups)


def null_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of the null blocks, one per group."""
    return sum(group.block_bytes for group in groups)


def slot_bytes(groups: Sequence[KVCacheGroupSpec], model_len: int, step_tokens: int) -> int:
    """Bytes that one sequence of `model_len` tokens holds at most, `step_tokens` of them uncommitted."""
    return sum(g.max_live_blocks(model_len, step_tokens) * g.block_bytes for g in groups)


def plan_groups(
    groups: Sequence[KVCacheGroupSpec], kv_bytes: int, model_len: int, step_tokens: int, max_num_seqs: int
) -> tuple[GroupPlan, ...]:
    """Share `kv_bytes` out among the groups, for at most `max_num_seqs` full sequences.

    `kv_bytes` must hold the null blocks and one slot; the plan never takes more than `kv_bytes`.
    """
    spare = kv_bytes - null_bytes(groups)
    per_slot = slot_bytes(groups, model_len, step_tokens)

    def plan(group: KVCacheGroupSpec) -> GroupPlan:
        live = group.max_live_blocks(model_len, step_tokens)
        usable = min(spare * live // per_slot, max_num_seqs * live, MAX_SLOT // group.block_size - 1)
        return GroupPlan(
            name=group.name,
            kind=group.kind,
            tier="device",
            num_layers=len({layer for tensor in group.tensors for layer in tensor.layers}),
            block_tokens=group.block_size,
            block_bytes=group.block_bytes,
            num_blocks=1 + usable,
            live_blocks=live,
        )

    return tuple(plan(group) for group in groups)


def tier_slots(groups: Sequence[KVCacheGroupSpec], size_bytes: int) -> tuple[int, ...]:
    """Blocks of each group that a lower tier of `size_bytes` keeps: history of N tokens, and tails for N tokens.

    Tails of window and state groups are kept at checkpoints, which are counted twice as often as they come in one
    sequence, because each prompt and turn ends with one too. A block takes a multiple of 4096 bytes.
    """
    step = math.lcm(*(group.block_size for group in groups))

    def tail(group: KVCacheGroupSpec) -> int:
        return max(
            (end - group.first_needed(end) // group.block_size * group.block_size) // group.block_size
            for end in range(step, 9 * step, step)
        )

    def per_token(group: KVCacheGroupSpec) -> float:
        return 1 / group.block_size if group.keeps_history else 2 * tail(group) / CHECKPOINT_TOKENS

    strides = [-(-group.block_bytes // 4096) * 4096 for group in groups]
    num_tokens = size_bytes / sum(per_token(group) * stride for group, stride in zip(groups, strides, strict=True))
    return tuple(max(int(num_tokens * per_token(group)), 0 if group.keeps_history else 1) for group in groups)


def plan_tier(groups: Sequence[KVCacheGroupSpec], tier: TierConfig) -> tuple[GroupPlan, ...]:
    """What each group gets in a lower tier."""
    return tuple(
        GroupPlan(
            name=group.name,
            kind=group.kind,
            tier=tier.tier,
            num_layers=len({layer for tensor in group.tensors for layer in tensor.layers}),
            block_tokens=group.block_size,
            block_bytes=group.block_bytes,
            num_blocks=slots,
            live_blocks=0,
        )
        for group, slots in zip(groups, tier.num_slots, strict=True)
    )


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
            self._uncommitted(model_len),
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

    def _uncommitted(self, model_len: int) -> int:
        """Most tokens of one sequence that are computed before the first of them is committed and published."""
        in_flight = min(model_len, self.step_tokens(model_len)) * self.defaults.depth
        return in_flight + publication_lag(self.model.kv_groups)

    def _workspace(self, model_len: int) -> int:
        if self.defaults.simulated:
            return 0
        return workspace_bytes(self.model, self.max_num_seqs, self.step_tokens(model_len))

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
        groups = self.model.kv_groups
        return null_bytes(groups) + slot_bytes(groups, model_len, self._uncommitted(model_len))

    def _fits(self, model_len: int) -> bool:
        return self._kv_needed(model_len) <= self._kv_limit(model_len) <= self._room(model_len)

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
