"""Drives a CPU program without an engine: sequences with random block ids, in any mixture of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pypto_serving.backend.base import StepInputs
from pypto_serving.backend.cpu import CpuBackend, NativeProgram
from pypto_serving.config import EngineConfig
from pypto_serving.model.registry import load_spec

Array = np.ndarray[Any, Any]

BFLOAT16_NAN = 0x7FC0


def load_program(
    path: Path,
    dtype: str = "float32",
    num_blocks: int = 200,
    max_model_len: int = 1024,
    threads: int = 2,
    block_size: int = 32,
    kernels: str = "torch",
    packed_cache: str = "",
) -> Any:
    """The CPU program of a checkpoint, on torch or on the kernels of an instruction set."""
    spec = load_spec(path, dtype, block_size)
    config = EngineConfig(
        model=str(path),
        backend="cpu",
        dtype=dtype,
        vocab_size=spec.vocab_size,
        groups=spec.kv_groups,
        num_blocks=(num_blocks,),
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        num_threads=threads,
        kernels=kernels,
        packed_cache=packed_cache,
    )
    return CpuBackend(config).prepare(lambda *_: None)


def poison(program: Any, blocks: Sequence[int]) -> None:
    """Fill blocks with NaN: a stale value that is read spoils everything."""
    if isinstance(program, NativeProgram):
        program.model.pages[list(blocks)] = BFLOAT16_NAN
    else:
        program.model.arena.pages[list(blocks)] = torch.nan


@dataclass
class Sequence_:
    """A token sequence and how far it is computed; `logits` has a row for each position that asked for one."""

    tokens: Array
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, Array] = field(default_factory=dict)


class Sequences:
    """Hands out block ids at random and runs steps. All pages start as NaN, and the null block stays so."""

    def __init__(self, program: Any, seed: int = 0) -> None:
        self.program = program
        self.block_size = program.groups[0].block_size
        self._rng = np.random.default_rng(seed)
        poison(program, range(program.num_blocks[0]))
        self._free = list(self._rng.permutation(np.arange(1, program.num_blocks[0])))

    def add(self, tokens: Array) -> Sequence_:
        return Sequence_(np.asarray(tokens, dtype=np.int32))

    def free(self, sequence: Sequence_) -> None:
        """Give the blocks back, poisoned, in random order, and forget what was computed."""
        poison(self.program, sequence.blocks)
        self._free += sequence.blocks
        self._rng.shuffle(self._free)
        sequence.blocks, sequence.computed = [], 0

    def step(self, work: Sequence[tuple[Sequence_, int]]) -> None:
        """Compute the next `n` tokens of each sequence, with logits of the last of them."""
        for sequence, count in work:
            wanted = -(-(sequence.computed + count) // self.block_size)
            sequence.blocks += [int(self._free.pop()) for _ in range(wanted - len(sequence.blocks))]
        self.last_inputs = self._inputs(work)
        logits = self.program.run(self.last_inputs).logits
        for (sequence, count), row in zip(work, logits, strict=True):
            sequence.computed += count
            sequence.logits[sequence.computed - 1] = row.copy()

    def _inputs(self, work: Sequence[tuple[Sequence_, int]]) -> StepInputs:
        def int32(values: Any) -> Array:
            return np.asarray(values, dtype=np.int32)

        counts = [count for _, count in work]
        starts = np.cumsum([0, *counts])
        positions = [np.arange(s.computed, s.computed + n) for s, n in work]
        slots = [
            np.take(s.blocks, p // self.block_size) * self.block_size + p % self.block_size
            for (s, _), p in zip(work, positions, strict=True)
        ]
        tables = np.zeros((len(work), max(len(s.blocks) for s, _ in work)), dtype=np.int32)
        for row, (sequence, _) in zip(tables, work, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        return StepInputs(
            token_ids=int32(np.concatenate([s.tokens[p] for (s, _), p in zip(work, positions, strict=True)])),
            positions=int32(np.concatenate(positions)),
            query_start=int32(starts),
            context_lens=int32([s.computed + n for s, n in work]),
            logits_rows=int32(starts[1:] - 1),
            slot_mapping=(int32(np.concatenate(slots)),),
            block_tables=(tables,),
            fresh_blocks=(int32([]),),
        )

    def run(self, sequence: Sequence_, chunks: Sequence[int]) -> None:
        """Compute a sequence alone in chunks; the last one is cut to what is left."""
        for chunk in chunks:
            left = len(sequence.tokens) - sequence.computed
            if left:
                self.step([(sequence, min(chunk, left))])
