"""The null backend: a device of simulated pages that proves what schedulers and block tables do.

Every page row remembers which token at which position was written to it. The next token of a sequence is a hash
of what is read back through the block tables of every group, so a wrong, stale or freed block changes the output
or is noticed at once. Steps take virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import Backend, Progress, StepInputs, StepOutput
from pypto_serving.config import EngineConfig
from pypto_serving.types.arrays import Int32Array, UInt64Array
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import hash128

POISON = np.uint64(0)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), never 0, so that it cannot be taken for poison."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def row_values(token_ids: NDArray[np.integer], positions: NDArray[np.integer]) -> UInt64Array:
    """What a page row holds for each token at its absolute position."""
    return mix(token_ids.astype(np.uint64) + (positions.astype(np.uint64) << np.uint64(32)))


def read_start(group: KVCacheGroupSpec, position: int) -> int:
    """First position whose row a query at `position` reads in a group with one row per token."""
    if group.kind == "rolling_state":
        return max(0, position // group.period * group.period - group.overlap)
    return group.first_needed(position)


def next_token(groups: Sequence[KVCacheGroupSpec], token_ids: Sequence[int], vocab_size: int) -> int:
    """The token that follows `token_ids`: what a correct engine makes of the null backend."""
    tokens = np.asarray(token_ids, dtype=np.int64)
    last = len(tokens) - 1
    values = row_values(tokens, np.arange(len(tokens)))
    digests = []
    for group in groups:
        for tensor in group.tensors:
            if tensor.ratio == 1:
                digests.append(_digest(values[read_start(group, last) :]))
            else:
                closed = (last + 1) // tensor.ratio
                digests.append(_digest(_fold(values[: closed * tensor.ratio], tensor.ratio)))
    return _token(digests, vocab_size)


def _fold(values: UInt64Array, ratio: int) -> UInt64Array:
    """Compressed entries: one for every `ratio` rows."""
    return mix(values.reshape(-1, ratio).sum(axis=1, dtype=np.uint64))


def _digest(values: UInt64Array) -> int:
    return int(values.sum(dtype=np.uint64)) ^ len(values)


def _token(digests: Sequence[int], vocab_size: int) -> int:
    data = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return int.from_bytes(hash128(data)[:8], "little") % vocab_size


class NullProgram:
    """Pages as uint64 arrays, one value per row; page 0 is the null block. Owns nothing but these pages.

    `_pages[g]` is [num_blocks, rows of all tensors], of which tensor i has the columns from `_columns[g][i]` on.
    """

    sampler = None

    def __init__(self, config: EngineConfig) -> None:
        self.groups = config.groups
        self.num_blocks = config.num_blocks
        self.limits = msgspec.structs.replace(config.limits, samples_on_device=True)
        self.fingerprint = hash128(b"null", str(config.vocab_size).encode(), repr(config.groups).encode())
        options = config.backend_options
        self._seconds_per_step = float(options.get("seconds_per_step", 0.0))
        self._seconds_per_token = float(options.get("seconds_per_token", 0.0))
        self._vocab_size = config.vocab_size
        rows = [[group.block_size // tensor.ratio for tensor in group.tensors] for group in self.groups]
        self._columns = [np.cumsum([0, *counts]).tolist() for counts in rows]
        self._pages = [
            np.full((blocks, sum(counts)), POISON) for blocks, counts in zip(self.num_blocks, rows, strict=True)
        ]
        self.arenas = tuple(pages.view(np.uint8) for pages in self._pages)

    def run(self, inputs: StepInputs) -> StepOutput:
        """Write the rows of the step's tokens, then hash what every sampling row can read.

        Raises RuntimeError when a row that was never written, or was written by somebody else, is read.
        """
        self._poison(inputs)
        self._write(inputs)
        owners = np.searchsorted(inputs.query_start, inputs.logits_rows, side="right") - 1
        tokens = [
            self._next_token(inputs, int(row), int(inputs.positions[index]))
            for row, index in zip(owners, inputs.logits_rows, strict=True)
        ]
        elapsed_s = self._seconds_per_step + self._seconds_per_token * len(inputs.token_ids)
        return StepOutput(token_ids=np.asarray(tokens, dtype=np.int32), virtual_s=elapsed_s)

    def _poison(self, inputs: StepInputs) -> None:
        for g, blocks in enumerate(inputs.fresh_blocks):
            self._pages[g][blocks] = POISON

    def _write(self, inputs: StepInputs) -> None:
        """Rows of rolling state and plain rows first: compressed entries are folded from them."""
        values = row_values(inputs.token_ids, inputs.positions)
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio == 1:
                    self._pages[g][self._place(g, i, inputs.slot_mapping[g])] = values
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                if tensor.ratio > 1:
                    self._write_entries(inputs, g, i, tensor)

    def _place(self, g: int, tensor: int, slots: Any) -> tuple[Any, Any]:
        """Block and column of a tensor's rows that source tokens in `slots` have."""
        block, offset = np.divmod(slots, self.groups[g].block_size)
        return block, self._columns[g][tensor] + offset // self.groups[g].tensors[tensor].ratio

    def _write_entries(self, inputs: StepInputs, g: int, i: int, tensor: KVTensorSpec) -> None:
        closing = np.flatnonzero((inputs.positions + 1) % tensor.ratio == 0)
        owners = np.searchsorted(inputs.query_start, closing, side="right") - 1
        source = next(i for i, group in enumerate(self.groups) if group.name == tensor.folded_from)
        for index, row in zip(closing, owners, strict=True):
            position = int(inputs.positions[index])
            rows = self._read(inputs, source, int(row), position - tensor.ratio + 1, position + 1)
            self._pages[g][self._place(g, i, inputs.slot_mapping[g][index])] = _fold(rows, tensor.ratio)[0]

    def _next_token(self, inputs: StepInputs, row: int, position: int) -> int:
        digests = []
        for g, group in enumerate(self.groups):
            for i, tensor in enumerate(group.tensors):
                end = (position + 1) // tensor.ratio * tensor.ratio
                start = read_start(group, position) if tensor.ratio == 1 else 0
                digests.append(_digest(self._read(inputs, g, row, start, end, i)))
        return _token(digests, self._vocab_size)

    def _read(self, inputs: StepInputs, g: int, row: int, start: int, end: int, tensor: int = 0) -> UInt64Array:
        """Rows of positions [start, end) through the block table: slot = block * block_size + position % block_size."""
        group = self.groups[g]
        ratio = group.tensors[tensor].ratio
        positions = np.arange(start, end, ratio)
        blocks: Int32Array = inputs.block_tables[g][row, positions // group.block_size]
        slots = blocks * group.block_size + positions % group.block_size
        values = self._pages[g][self._place(g, tensor, slots)]
        if (blocks == 0).any() or (values == POISON).any():
            raise RuntimeError(f"group {group.name}: a row of positions [{start}, {end}) is read but not there")
        return values


class NullBackend(Backend):
    """Needs no device and no checkpoint."""

    def prepare(self, progress: Progress) -> NullProgram:
        progress("prepare", 1, 1)
        return NullProgram(self.config)


def _row(name: str, layers: int, width: int, dtype: str, ratio: int = 1, folded_from: str = "") -> KVTensorSpec:
    return KVTensorSpec(
        name=name, layers=tuple(range(layers)), dtype=dtype, row_shape=(width,), ratio=ratio, folded_from=folded_from
    )


def plain_groups(block_size: int = 16) -> tuple[KVCacheGroupSpec, ...]:
    """One full-history group, as Qwen3 has."""
    return (
        KVCacheGroupSpec(name="kv", kind="full", block_size=block_size, tensors=(_row("kv", 28, 2048, "bfloat16"),)),
    )


def deepseek_v4_groups() -> tuple[KVCacheGroupSpec, ...]:
    """The six cache families of DeepSeek V4 Flash: 43 layers, of which 21 CSA (ratio 4) and 20 HCA (ratio 128)."""
    return (
        KVCacheGroupSpec(
            name="ori", kind="sliding_window", block_size=128, window=128, tensors=(_row("kv", 43, 512, "bfloat16"),)
        ),
        KVCacheGroupSpec(
            name="cmp",
            kind="compressed",
            block_size=128,
            tensors=(
                _row("csa", 21, 512, "bfloat16", 4, "csa_state"),
                _row("hca", 20, 512, "bfloat16", 128, "hca_state"),
            ),
        ),
        KVCacheGroupSpec(
            name="idx", kind="compressed", block_size=128, tensors=(_row("key", 21, 132, "int8", 4, "csa_inner_state"),)
        ),
        _state("hca_state", 8, 128, 0, _row("state", 20, 1024, "float32")),
        _state("csa_state", 4, 4, 4, _row("state", 21, 2048, "float32")),
        _state("csa_inner_state", 4, 4, 4, _row("state", 21, 512, "float32")),
    )


def _state(name: str, block_size: int, period: int, overlap: int, tensor: KVTensorSpec) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(
        name=name, kind="rolling_state", block_size=block_size, period=period, overlap=overlap, tensors=(tensor,)
    )


def null_spec(name: str = "plain") -> ModelSpec:
    """A model without weights: `plain` or `deepseek_v4` name its KV groups. Raises KeyError for other names."""
    groups = {"plain": plain_groups, "deepseek_v4": deepseek_v4_groups}[name]()
    return ModelSpec(
        path="",
        architecture="Null",
        dtype="bfloat16",
        num_layers=43 if name == "deepseek_v4" else 28,
        vocab_size=129280 if name == "deepseek_v4" else 151936,
        max_position_embeddings=1 << 20 if name == "deepseek_v4" else 40960,
        num_parameters=0,
        weight_bytes=0,
        kv_groups=groups,
    )
