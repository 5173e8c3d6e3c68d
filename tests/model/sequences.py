"""Drives a CPU program without an engine: sequences with random block ids, in any mixture of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.backend.base import Progress, StepInputs
from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.types.config import Activations, Head
from pypto_serving.types.step import BackendTraits
from tests.configs import make_config

Array = np.ndarray[Any, Any]
Choose = Callable[[Array, int], int]
"""Chooses the token at a position by its logits [vocab]."""


def best(logits: Array, position: int) -> int:
    return int(logits.argmax())


BFLOAT16_NAN, FLOAT32_NAN = 0x7FC0, 0x7FC00000


def load_program(
    path: Path,
    dtype: str = "float32",
    num_blocks: int | tuple[int, ...] = 200,
    max_model_len: int = 1024,
    threads: int = 2,
    block_size: int = 32,
    kernels: str = "torch",
    packed_cache: str = "",
    progress: Progress = lambda *_: None,
    activations: Activations = "int8",
    head: Head = "auto",
    kv_dtype: str = "auto",
    num_drafts: int = 0,
) -> Any:
    """The CPU program of a checkpoint, on torch or on the kernels of an instruction set."""
    spec = load_spec(path, Serving(dtype, block_size, kv_dtype=kv_dtype, drafts=num_drafts > 0))
    config = make_config(
        model=str(path),
        backend="cpu",
        dtype=dtype,
        vocab_size=spec.vocab_size,
        groups=spec.kv_groups,
        num_blocks=(num_blocks,) * len(spec.kv_groups) if isinstance(num_blocks, int) else num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        num_threads=threads,
        kernels=kernels,
        activations=activations,
        head=head,
        packed_cache=packed_cache,
        traits=BackendTraits(max_drafts=num_drafts),
        num_drafts=num_drafts,
    )
    return CpuBackend(config).prepare(progress)


def compute(program: Any, inputs: StepInputs) -> Any:
    """Logits float32 [s, vocab] of one step."""
    program.submit(inputs, None)
    return program.collect().logits


def poison(program: Any, blocks: Sequence[Sequence[int]]) -> None:
    """Fill each group's blocks with NaN: a stale value that is read spoils everything."""
    for number, (group, arena, ids) in enumerate(zip(program.groups, program.memory.arenas, blocks, strict=True)):
        wide = group.tensors[0].dtype == "float32"
        arena.view(np.uint32 if wide else np.uint16)[list(ids)] = FLOAT32_NAN if wide else BFLOAT16_NAN
        program.memory.write_blocks(number, ids, arena)


@dataclass
class Sequence_:
    """A token sequence and how far it is computed; `logits` has a row for each position that asked for one.

    `tables[g]` has a block for every one that the sequence needed so far; 0 stands for those given back.
    """

    tokens: Array
    tables: list[list[int]]
    computed: int = 0
    logits: dict[int, Array] = field(default_factory=dict)


class Sequences:
    """Hands out block ids at random and runs steps. All pages start as NaN, and the null block stays so.

    Blocks of window and state groups that are out of reach are given back, poisoned, after each step.
    """

    def __init__(self, program: Any, seed: int = 0) -> None:
        self.program = program
        self.groups = program.groups
        self._rng = np.random.default_rng(seed)
        poison(program, [range(count) for count in program.num_blocks])
        self._free = [list(self._rng.permutation(np.arange(1, count))) for count in program.num_blocks]

    def add(self, tokens: Array) -> Sequence_:
        return Sequence_(np.asarray(tokens, dtype=np.int32), [[] for _ in self.groups])

    def free(self, sequence: Sequence_) -> None:
        """Give the blocks back, poisoned, in random order, and forget what was computed."""
        self._give_back([[block for block in table if block] for table in sequence.tables])
        sequence.tables, sequence.computed = [[] for _ in self.groups], 0

    def _give_back(self, blocks: Sequence[Sequence[int]]) -> None:
        poison(self.program, blocks)
        for free, ids in zip(self._free, blocks, strict=True):
            free += ids
            self._rng.shuffle(free)

    def step(self, work: Sequence[tuple[Sequence_, int]], everywhere: bool = False) -> None:
        """Compute the next `n` tokens of each sequence, with logits of the last of them, or of all."""
        self._take_blocks(work)
        self.last_inputs = self._inputs(work, everywhere)
        logits = iter(compute(self.program, self.last_inputs))
        for sequence, count in work:
            sequence.computed += count
            for position in range(sequence.computed - (count if everywhere else 1), sequence.computed):
                sequence.logits[position] = next(logits).copy()
            self._drop(sequence)

    def draft(self, sequences: Sequence[Sequence_], passes: int) -> Array:
        """Draft `passes` tokens behind the one that each sequence computes next: logits [sequences, passes, vocab].

        The drafts stay behind the computed tokens of the sequences.
        """
        found = []
        computed = [sequence.computed for sequence in sequences]
        for _ in range(passes):
            self._take_blocks([(sequence, 1) for sequence in sequences])
            found.append(self.program.draft(self._inputs([(s, 1) for s in sequences], False)).copy())
            for sequence, logits in zip(sequences, found[-1], strict=True):
                sequence.computed += 1
                sequence.tokens[sequence.computed] = logits.argmax()
        for sequence, count in zip(sequences, computed, strict=True):
            sequence.computed = count
        return np.stack(found, axis=1)

    def _take_blocks(self, work: Sequence[tuple[Sequence_, int]]) -> None:
        for sequence, count in work:
            for group, table, free in zip(self.groups, sequence.tables, self._free, strict=True):
                wanted = -(-(sequence.computed + count) // group.block_size)
                table += [int(free.pop()) for _ in range(wanted - len(table))]

    def _drop(self, sequence: Sequence_) -> None:
        """Give back what no later token of the sequence needs."""
        dropped = []
        for group, table in zip(self.groups, sequence.tables, strict=True):
            end = group.first_needed(sequence.computed) // group.block_size
            dropped.append([block for block in table[:end] if block])
            table[:end] = [0] * len(table[:end])
        self._give_back(dropped)

    def fork(self, sequence: Sequence_, tokens: Array) -> Sequence_:
        """A sequence of `tokens` that goes on where `sequence` is, at the end of a block, with blocks of its own.

        It has copies of what a resumed request needs, and of nothing else.
        """
        other = self.add(tokens)
        other.computed = end = sequence.computed
        for g, group in enumerate(self.groups):
            assert end % group.block_size == 0
            first = min(end, group.first_needed(end)) // group.block_size
            other.tables[g] += [0] * first
            for block in sequence.tables[g][first : end // group.block_size]:
                other.tables[g].append(int(self._free[g].pop()))
                self.program.memory.arenas[g][other.tables[g][-1]] = self.program.memory.arenas[g][block]
        return other

    def _inputs(self, work: Sequence[tuple[Sequence_, int]], everywhere: bool) -> StepInputs:
        counts = [count for _, count in work]
        starts = np.cumsum([0, *counts])
        positions = [np.arange(s.computed, s.computed + n) for s, n in work]
        addresses = [self._addresses(g, work, positions) for g in range(len(self.groups))]
        return StepInputs(
            token_ids=int32(np.concatenate([s.tokens[p] for (s, _), p in zip(work, positions, strict=True)])),
            positions=int32(np.concatenate(positions)),
            query_start=int32(starts),
            context_lens=int32([s.computed + n for s, n in work]),
            logits_rows=int32(np.arange(starts[-1]) if everywhere else starts[1:] - 1),
            slot_mapping=tuple(slots for slots, _ in addresses),
            block_tables=tuple(table for _, table in addresses),
            fresh_blocks=tuple(int32([]) for _ in self.groups),
        )

    def _addresses(
        self, g: int, work: Sequence[tuple[Sequence_, int]], positions: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Slots of the step's tokens in group g, and block tables."""
        size, tables = self.groups[g].block_size, [sequence.tables[g] for sequence, _ in work]
        slots = [np.take(t, p // size) * size + p % size for t, p in zip(tables, positions, strict=True)]
        packed = np.zeros((len(work), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(packed, tables, strict=True):
            row[: len(table)] = table
        return int32(np.concatenate(slots)), packed

    def run(self, sequence: Sequence_, chunks: Sequence[int], everywhere: bool = False) -> None:
        """Compute a sequence alone in chunks; the last one is cut to what is left."""
        for chunk in chunks:
            left = len(sequence.tokens) - sequence.computed
            if left:
                self.step([(sequence, min(chunk, left))], everywhere)

    def continued(self, prompts: Sequence[Sequence[int]], count: int, choose: Choose = best) -> list[list[int]]:
        """What the program makes of all prompts at once, greedily unless it shall `choose`: `count` tokens each."""
        work = [self.add(np.asarray([*prompt, *[0] * count])) for prompt in prompts]
        ends = [len(prompt) for prompt in prompts]
        for sequence, end in zip(work, ends, strict=True):
            self.step([(sequence, end)])
        for _ in range(count):
            for sequence in work:
                end = sequence.computed
                sequence.tokens[end] = choose(sequence.logits[end - 1], end)
            self.step([(sequence, 1) for sequence in work])
        return [sequence.tokens[end:].tolist() for sequence, end in zip(work, ends, strict=True)]


def int32(values: Any) -> Array:
    return np.asarray(values, dtype=np.int32)
