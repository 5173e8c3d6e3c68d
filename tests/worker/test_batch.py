"""RowBatch: what differences leave in the dispatch buffers is what laying out everything anew would write there."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.base import StepBuffers, StepInputs
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import BackendLimits, BackendTraits, NewRow, StepPlan
from pypto_serving.worker.batch import Dispatch, RowBatch
from tests.thinning import examples

TENSOR = KVTensorSpec(name="k", layers=(0,), dtype="bfloat16", row_shape=(1,))
GROUPS = tuple(FullSpec(name=f"of {size}", tensors=(TENSOR,), block_size=size) for size in (4, 1, 16))
ROWS, LENGTH = 6, 60


@dataclass
class Row:
    """Everything about a row, as `RowBatch` describes it."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    ahead: int = 0


@dataclass
class Entry:
    """The tokens of a row in a step: positions [start, start + count + drafts)."""

    index: int
    row: Row
    start: int
    count: int
    drafts: int
    samples: bool


@dataclass
class Model:
    """Makes random plans for a RowBatch and remembers all rows in plain lists; checks what is laid out against them."""

    rng: random.Random
    limits: BackendLimits
    rows: dict[int, Row] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    num_blocks: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.buffers = [StepBuffers.in_host_memory(GROUPS, self.limits) for _ in range(self.limits.held_dispatches)]
        self.batch = RowBatch(GROUPS, self.limits, self.buffers, 1000)
        self.held: deque[tuple[list[Dispatch], list[Entry]]] = deque()

    def step(self) -> None:
        """Drop some rows, start some, and compute tokens of some; collect the oldest step if no more are held."""
        for index in [index for index in self.rows if self.rng.random() < 0.1]:
            del self.rows[index]
            self.dropped.append(index)
        fresh: list[list[int]] = [[] for _ in GROUPS]
        starting = [index for index in range(ROWS) if index not in self.rows and self.rng.random() < 0.4]
        entries = [self.start(index) for index in starting]
        new_rows = [self.new_row(entry, fresh) for entry in entries]
        pairs: list[list[int]] = [[] for _ in GROUPS]
        for index, row in self.rows.items():
            if index not in starting and (entry := self.go_on(index, row)) is not None:
                entries.append(entry)
                self.grow(entry, pairs, fresh)
        self.rng.shuffle(entries)
        self.num_steps += 1
        plan = StepPlan(
            step_id=self.num_steps,
            epoch=0,
            rows=pack_ids([entry.index for entry in entries]),
            num_tokens=pack_ids([entry.count for entry in entries]),
            new_rows=new_rows,
            new_blocks=tuple(pack_ids(each) for each in pairs),
            drops=pack_ids(self.dropped),
            num_drafts=pack_ids([entry.drafts for entry in entries]) if self.limits.traits.max_drafts else b"",
        )
        self.dropped.clear()
        dispatches = self.batch.pack_plan(plan)
        self.check(dispatches, entries, fresh)
        for entry in entries:
            self.plan_sampling(entry)
        self.held.append((dispatches, entries))
        if len(self.held) >= self.limits.held_steps:
            self.collect()

    def start(self, index: int) -> Entry:
        known = self.rng.randrange(1, 30)
        computed = self.rng.choice([0, self.rng.randrange(known)])
        tokens = [self.rng.randrange(1, 1000) for _ in range(known)]
        row = self.rows[index] = Row(tokens, computed, [[] for _ in GROUPS])
        count = self.rng.choice([1, known - computed, self.rng.randrange(1, known - computed + 1)])
        return self.entry(index, row, count)

    def go_on(self, index: int, row: Row) -> Entry | None:
        missing = len(row.tokens) + row.ahead - row.computed
        if row.computed + missing + 2 * (1 + self.limits.traits.max_drafts) > LENGTH or self.rng.random() < 0.2:
            return None
        return self.entry(index, row, self.rng.randrange(1, missing + 1))

    def entry(self, index: int, row: Row, count: int) -> Entry:
        samples = row.computed + count == len(row.tokens) + row.ahead
        drafts = self.rng.randrange(1 + self.limits.traits.max_drafts) if samples and count == 1 else 0
        return Entry(index, row, row.computed, count, drafts, samples)

    def missing_blocks(self, entry: Entry, g: int) -> list[int]:
        """Hand out the blocks that the entry's tokens lack, and now and then one more."""
        end = entry.start + entry.count + entry.drafts + self.rng.choice([0, 0, GROUPS[g].block_size])
        count = max(0, -(-min(end, LENGTH) // GROUPS[g].block_size) - len(entry.row.tables[g]))
        self.num_blocks += count
        return list(range(self.num_blocks - count + 1, self.num_blocks + 1))

    def new_row(self, entry: Entry, fresh: list[list[int]]) -> NewRow:
        row = entry.row
        for g, group in enumerate(GROUPS):
            row.tables[g] = self.missing_blocks(entry, g)
            fresh[g] += row.tables[g][row.computed // group.block_size :]
        blocks = tuple(pack_ids(table) for table in row.tables)
        tokens = pack_ids(row.tokens)
        return NewRow(entry.index, tokens, len(row.tokens), row.computed, blocks, RowSampling())

    def grow(self, entry: Entry, pairs: list[list[int]], fresh: list[list[int]]) -> None:
        for g in range(len(GROUPS)):
            added = self.missing_blocks(entry, g)
            entry.row.tables[g] += added
            fresh[g] += added
            pairs[g] += [value for block_id in added for value in (entry.index, block_id)]

    def plan_sampling(self, entry: Entry) -> None:
        entry.row.computed += entry.count + entry.drafts
        entry.row.ahead += (1 + entry.drafts) * entry.samples

    def collect(self) -> None:
        """End the oldest step: of its drafts, some are accepted; rows that left since get tokens too."""
        dispatches, entries = self.held.popleft()
        by_index = {entry.index: entry for entry in entries}
        for dispatch in dispatches:
            sampled = [by_index[index] for index in dispatch.rows.tolist()]
            counts = [self.rng.randrange(1, 2 + entry.drafts) for entry in sampled]
            tokens = [[self.rng.randrange(1, 1000) for _ in range(count)] for count in counts]
            for entry, got in zip(sampled, tokens, strict=True):
                entry.row.tokens += got
                entry.row.ahead -= 1 + entry.drafts
                entry.row.computed -= 1 + entry.drafts - len(got)
            plain = not self.limits.traits.max_drafts
            flat = np.array([token for got in tokens for token in got], np.int32)
            self.batch.advance(dispatch, None if plain else np.array(counts, np.int32), flat)

    def check(self, dispatches: list[Dispatch], entries: list[Entry], fresh: list[list[int]]) -> None:
        """All inputs of a step, line by line in whatever order, are what the rows' lists say."""
        left = {entry.index: entry for entry in entries}
        for i, dispatch in enumerate(dispatches):
            inputs = dispatch.inputs
            chosen = [left.pop(index) for index in inputs.rows[: inputs.num_rows].tolist()]
            if inputs.kind != "mixed":
                assert all((entry.count == 1) == (inputs.kind == "decode") for entry in chosen)
            blocks = [sorted(ids.tolist()) for ids in inputs.fresh_blocks]
            assert blocks == [sorted(ids) for ids in fresh] if i == 0 else not any(blocks)
            sampling = [place for place, entry in enumerate(chosen) if entry.samples]
            assert dispatch.owners.tolist() == sampling
            assert dispatch.rows.tolist() == [chosen[place].index for place in sampling]
            ends = inputs.query_start.tolist()[1:]
            wanted = [(ends[p] - chosen[p].drafts - 1, ends[p]) for p in sampling]
            assert inputs.logits_rows.tolist() == [token for start, end in wanted for token in range(start, end)]
            assert inputs.pending.tolist() == [place for place, entry in enumerate(chosen) if entry.row.ahead]
            for place, entry in enumerate(chosen):
                self.check_row(inputs, place, entry)
            self.check_padding(inputs)
        assert not left

    def check_row(self, inputs: StepInputs, place: int, entry: Entry) -> None:
        first, end = inputs.query_start[place : place + 2].tolist()
        positions = list(range(entry.start, entry.start + entry.count + entry.drafts))
        assert inputs.positions[first:end].tolist() == positions
        known = [p for p in positions if p < len(entry.row.tokens)]
        assert inputs.token_ids[first : first + len(known)].tolist() == [entry.row.tokens[p] for p in known]
        assert inputs.context_lens[place] == positions[-1] + 1
        if len(inputs.num_drafts):
            assert inputs.num_drafts[place] == entry.drafts
        for g, group in enumerate(GROUPS):
            size, table = group.block_size, entry.row.tables[g]
            slots = [table[p // size] * size + p % size for p in positions]
            assert inputs.slot_mapping[g][first:end].tolist() == slots
            assert inputs.block_tables[g][place, : len(table)].tolist() == table

    def check_padding(self, inputs: StepInputs) -> None:
        """Each padding row computes token 0 at position 0 in the null block."""
        live, padded = inputs.num_rows, len(inputs.rows)
        assert inputs.kind == "decode" or live == padded
        assert (inputs.rows[live:] == -1).all() and (inputs.context_lens[live:] == 1).all()
        first = inputs.query_start[live]
        assert inputs.query_start[live:].tolist() == list(range(first, first + padded - live + 1))
        for array in (inputs.token_ids, inputs.positions, *inputs.slot_mapping):
            assert len(array) == first + padded - live and not array[first:].any()
        assert not any(table[live:, :1].any() for table in inputs.block_tables)


TRAITS = {
    "host samples": BackendTraits(),
    "device samples": BackendTraits(samples_on_device=True),
    "split and padded": BackendTraits(mixed_steps=False, padded_rows=(2, 4, 6)),
    "device drafts": BackendTraits(samples_on_device=True, max_drafts=3),
    "all": BackendTraits(mixed_steps=False, padded_rows=(6,), samples_on_device=True, max_drafts=2),
}


@pytest.mark.parametrize("traits", TRAITS)
@examples(40)
@given(depth=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_differences_lead_to_what_the_rows_hold(traits: str, depth: int, seed: int) -> None:
    limits = BackendLimits(
        max_num_seqs=ROWS, max_num_batched_tokens=256, max_model_len=LENGTH, depth=depth, traits=TRAITS[traits]
    )
    model = Model(random.Random(seed), limits)
    for _ in range(25):
        model.step()
