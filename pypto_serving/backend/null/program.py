"""NullBackend and NullProgram: run dispatches on simulated pages, with the traits of the configuration."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pypto_serving.backend.base import (
    Backend,
    BlockMemory,
    Draft,
    HostBlocks,
    Progress,
    SampledTokens,
    SamplingInputs,
    StepInputs,
    StepOutput,
)
from pypto_serving.backend.null.device import SimulatedPages, SimulatedSampler, Tokens, guess, logits_of
from pypto_serving.types.arrays import BlockBytes, Float32Array, Int32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.sampler import Sampler
from pypto_serving.util import hash128


class DeviceBlocks(HostBlocks):
    """Blocks that are read and written only by copies, as in device memory. Implements BlockMemory."""

    def __init__(self, arenas: Sequence[BlockBytes], counts: Counter[str]) -> None:
        super().__init__(arenas)
        self._counts = counts

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return copies of the blocks."""
        self._counts["read_blocks"] += len(blocks)
        return [self.arenas[group][block].copy() for block in blocks]

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return new memory."""
        return [np.empty(self.block_bytes[group], np.uint8) for _ in blocks]

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Copy `contents` into the blocks."""
        self._counts["write_blocks"] += len(blocks)
        for block, content in zip(blocks, contents, strict=True):
            self.arenas[group][block] = content


@dataclass(slots=True)
class _SimulatedRow:
    """The last token that the device sampled for a row, and its position."""

    token: int
    position: int


class NullProgram:
    """Owns the pages, and the tokens that it sampled for each row. Implements Program.

    A dispatch runs only when it is collected, so reusing a buffer too early changes the answer. `counts` has statistics
    for tests: dispatches by kind, padded rows, pending rows, rows moved back, drafts, constraints, transfers.

    Options:

    - `seconds_per_step`, `seconds_per_token`: virtual time.
    - `draft_accuracy`: in [0, 1].
    - `fails_on`: a row fails when this is its greedy next token.
    - `device_memory`: copy blocks to and from the host.
    """

    sampler: Sampler | None = None

    def __init__(self, config: EngineConfig) -> None:
        options = config.worker.backend_options
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.fingerprint = hash128(b"null", str(config.model.vocab_size).encode(), repr(config.cache.groups).encode())
        self.counts: Counter[str] = Counter()
        self._vocab_size = config.model.vocab_size
        self._seconds_per_step = float(options.get("seconds_per_step", 0.0))
        self._seconds_per_token = float(options.get("seconds_per_token", 0.0))
        self._accuracy = float(options.get("draft_accuracy", 0.5))
        self._fails_on = int(options.get("fails_on", -1))
        self._pages = SimulatedPages(self.groups, self.num_blocks)
        arenas = [pages.view(np.uint8) for pages in self._pages.arenas]
        self.memory: BlockMemory = (
            DeviceBlocks(arenas, self.counts) if options.get("device_memory") else HostBlocks(arenas)
        )
        self.draft: Draft | None = self._draft if config.drafts_in_model else None
        self._held: deque[tuple[StepInputs, SamplingInputs | None]] = deque()
        self._done: deque[StepOutput] = deque()
        self._rows: dict[int, _SimulatedRow] = {}
        longest = self.limits.max_model_len + 1 + self.limits.traits.max_drafts
        self._sampled = np.zeros((self.limits.max_num_seqs, longest), np.int32)

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None) -> None:
        """Hold a dispatch until it is collected. Raises RuntimeError if it violates the traits."""
        traits = self.limits.traits
        self._held.append((inputs, sampling))
        held, most = len(self._held) + len(self._done), self.limits.held_dispatches
        _require(held <= most, f"{held} dispatches are held, but at most {most} can be")
        _require((sampling is not None) == traits.samples_on_device, "sampling inputs go to a device that samples")
        counts = np.diff(inputs.query_start)
        if len(inputs.num_drafts):
            counts -= inputs.num_drafts
        _require(len(inputs.token_ids) == inputs.query_start[-1], "the buffers are too small for the rows")
        _require(inputs.token_ids.min(initial=0) >= 0, "a token id is negative")
        _require(traits.mixed_steps or inputs.kind in ("decode", "prefill"), "a step was not split")
        _require(inputs.kind != "decode" or (counts == 1).all(), "a decode has more than one token")
        _require(inputs.kind != "prefill" or (counts > 1).all(), "a prefill dispatch has a decode")
        if inputs.kind == "decode" and traits.padded_rows:
            _require(len(inputs.rows) in traits.padded_rows, f"{len(inputs.rows)} rows are not padded")
        self._check_chunks(inputs, counts)
        self.counts[inputs.kind] += 1
        self.counts["padded_rows"] += len(inputs.rows) - inputs.num_rows
        self.counts["pending"] += len(inputs.pending)
        self.counts["overlapping"] += held > 1 and not traits.samples_on_device

    def _check_chunks(self, inputs: StepInputs, counts: Int32Array) -> None:
        """Require that each chunk is a multiple of `chunk_tokens`, except the last one of a prompt."""
        size = self.limits.traits.chunk_tokens
        sampling = np.zeros(len(inputs.token_ids), bool)
        sampling[inputs.logits_rows] = True
        ends = sampling[inputs.query_start[1:] - 1]
        # A row that failed while a later step was in flight computes one token and does not sample.
        cut = counts[: inputs.num_rows][~ends[: inputs.num_rows]]
        _require(not (cut[cut > 1] % size).any(), f"a prompt is cut at a place that is not a multiple of {size}")
        self.counts["cut_chunks"] += int((cut > 1).sum())

    def collect(self) -> StepOutput:
        """Return the output of the oldest dispatch, which runs now unless draft layers ran after it."""
        return self._done.popleft() if self._done else self._run()

    def _run(self) -> StepOutput:
        """Run the oldest dispatch: write the rows of its tokens, then hash the rows that each sampling row reads."""
        inputs, sampling = self._held.popleft()
        self._pages.poison(inputs.fresh_blocks)
        tokens = self._tokens(inputs)
        elapsed_s = self._seconds_per_step + self._seconds_per_token * len(tokens.ids)
        if sampling is None:
            self._pages.write(tokens)
            return StepOutput(logits=self._logits(inputs, tokens), virtual_s=elapsed_s)
        return StepOutput(sampled=self._sample(inputs, tokens, sampling), virtual_s=elapsed_s)

    def _draft(self, inputs: StepInputs) -> Float32Array:
        """Implement Draft: after the steps in flight, write the rows of the tokens and guess logits."""
        self.counts["draft_passes"] += 1
        self.counts["overlapping_passes"] += len(self._held) > 0
        while self._held:
            self._done.append(self._run())
        tokens = self._tokens(inputs)
        self._pages.write(tokens)
        digests = [self._digest(inputs, tokens, int(index)) for index in inputs.logits_rows]
        return np.stack([self._logits_of(guess(digest, digest, self._accuracy, 1 << 64)) for digest in digests])

    def _tokens(self, inputs: StepInputs) -> Tokens:
        """Return a dispatch's tokens; in pending rows, insert the sampled token, at its true position."""
        counts = np.diff(inputs.query_start)
        tokens = Tokens(
            inputs.token_ids.copy(),
            inputs.positions.copy(),
            np.arange(len(counts), dtype=np.int32).repeat(counts),
            [slots.copy() for slots in inputs.slot_mapping],
            inputs.block_tables,
        )
        for i in inputs.pending.tolist():
            own = slice(inputs.query_start[i], inputs.query_start[i + 1])
            last = self._rows[int(inputs.rows[i])]
            self.counts["moved"] += int(tokens.positions[own.start] != last.position)
            tokens.ids[own.start] = max(0, last.token)
            tokens.positions[own] = np.arange(last.position, last.position + counts[i])
            for g, group in enumerate(self.groups):
                block, offset = np.divmod(tokens.positions[own], group.block_size)
                tokens.slots[g][own] = tokens.tables[g][i, block] * group.block_size + offset
        return tokens

    def _logits(self, inputs: StepInputs, tokens: Tokens) -> Float32Array:
        found = [self._logits_of(self._digest(inputs, tokens, int(index))) for index in inputs.logits_rows]
        return np.stack(found) if found else np.empty((0, self._vocab_size), np.float32)

    def _logits_of(self, digest: int) -> Float32Array:
        return logits_of(digest, self._vocab_size, self._fails_on)

    def _digest(self, inputs: StepInputs, tokens: Tokens, index: int) -> int:
        """Hash the rows that the query at token `index` reads."""
        row, position = int(tokens.owners[index]), int(tokens.positions[index])
        return self._pages.digest([table[row] for table in inputs.block_tables], position)

    def _choose(self, sampler: SimulatedSampler, n: int, row: int, digest: int, position: int) -> int:
        """Sample the token at `position` of the n-th sampling row, which has the worker's index `row`."""
        if sampler.is_greedy[n] and digest % self._vocab_size != self._fails_on:
            return digest % self._vocab_size
        return sampler.choose(n, self._logits_of(digest), position, self._sampled[row])

    def _sample(self, inputs: StepInputs, tokens: Tokens, sampling: SamplingInputs) -> SampledTokens:
        """Write and sample row by row. Write each draft when the token before it is known."""
        sampler, drafts = SimulatedSampler(sampling), inputs.num_drafts
        known = np.ones(len(tokens.ids), bool)
        for i in drafts.nonzero()[0].tolist():
            known[inputs.query_start[i + 1] - drafts[i] : inputs.query_start[i + 1]] = False
        slots = [each[known] for each in tokens.slots]
        self._pages.write(
            Tokens(tokens.ids[known], tokens.positions[known], tokens.owners[known], slots, tokens.tables)
        )
        self.counts.update(sampler.wants())
        counts, chosen, digests = [], [], []
        for n, i in enumerate(sampling.owners.tolist()):
            num_drafts = int(drafts[i]) if len(drafts) else 0
            row = self._row(inputs, tokens, sampler, n, i, num_drafts)
            counts.append(len(row))
            chosen += [token for token, _ in row]
            digests += [digest for _, digest in row]
        ids = np.array(chosen, np.int32)
        found = sampler.logprobs(map(self._logits_of, digests), ids)
        return SampledTokens(counts=np.array(counts, np.int32), token_ids=ids, logprobs=found)

    def _row(
        self, inputs: StepInputs, tokens: Tokens, sampler: SimulatedSampler, n: int, i: int, num_drafts: int
    ) -> list[tuple[int, int]]:
        """Return row i's new tokens with their digests, up to the first that differs from its draft."""
        kept: list[tuple[int, int]] = []
        end, right, own = int(inputs.query_start[i + 1]), True, int(inputs.rows[i])
        for index in range(end - num_drafts - 1, end):
            digest, position = self._digest(inputs, tokens, index), int(tokens.positions[index]) + 1
            token = self._choose(sampler, n, own, digest, position)
            if right:
                kept.append((token, digest))
                self._rows[own] = _SimulatedRow(token, position)
                self._sampled[own, position] = token
            if index + 1 < end:
                draft = guess(max(0, token), digest, self._accuracy, self._vocab_size)
                right &= draft == token
                tokens.ids[index + 1] = draft
                self._pages.write(tokens.of(slice(index + 1, index + 2)))
        return kept


def _require(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


class NullBackend(Backend):
    """The backend of NullProgram. Needs no device and no checkpoint."""

    def prepare(self, progress: Progress) -> NullProgram:
        """Make the pages."""
        progress("prepare", 1, 1)
        return NullProgram(self.config)
