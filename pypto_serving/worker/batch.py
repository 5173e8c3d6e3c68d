"""RowBatch: keep a worker's persistent rows, convert plans to dispatches, and append the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from pypto_serving.backend.base import DispatchKind, StepBuffers, StepInputs
from pypto_serving.types.arrays import Int32Array, id_list, pack_ids, unpack_ids
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.step import BackendLimits, NewRow, StepPlan, num_taken_back
from pypto_serving.worker.drafts import MakeDrafter, RowDrafts
from pypto_serving.worker.guide_client import GuideProcess, MakeGuideProcess
from pypto_serving.worker.guides import RowGuides
from pypto_serving.worker.layout import NONE, DispatchLayout, DispatchRows, RowTables
from pypto_serving.worker.prompt_logprobs import PromptLogprobRows, PromptSpan
from pypto_serving.worker.sampler import RowSamplers


class Dispatch(NamedTuple):
    """StepInputs over some rows of a plan, and the n rows that sample.

    rows [n]: the rows that sample; owners [n]: their indices in the dispatch.
    positions [n]: the position of the first token that row i samples, if every draft in flight is accepted.
    num_drafts [n]: drafts that row i verifies; None if no row has drafts.
    num_logprobs [n]: log-probabilities that a device must return, see SamplingInputs; empty if the host samples.
    lives [n]: the lives of the rows, to detect later that a row has a new request; None if no steps are held.
    prompt_spans: prompt tokens, whose logits follow those of the sampling rows.
    """

    inputs: StepInputs
    rows: Int32Array
    owners: Int32Array
    positions: Int32Array
    num_drafts: Int32Array | None
    num_logprobs: Int32Array
    lives: Int32Array | None
    prompt_spans: Sequence[PromptSpan] = ()

    def each_drafts(self) -> Int32Array:
        """Return `num_drafts` int32 [n], with zeros if it is None."""
        return np.zeros(len(self.rows), np.int32) if self.num_drafts is None else self.num_drafts

    def drafts(self, i: int) -> list[int]:
        """Return the drafts of the i-th sampling row."""
        if self.num_drafts is None:
            return []
        end = int(self.inputs.query_start[self.owners[i] + 1])
        drafts: list[int] = self.inputs.token_ids[end - self.num_drafts[i] : end].tolist()
        return drafts


class RowBatch:
    """Owns the state of a worker's rows: tokens, numbers of computed ones, block tables, sampling parameters.

    If there are more `buffers` than held dispatches, the last one is for draft layers.

    Arrays are indexed by row in [0, R), R = max_num_seqs. A plan contains only differences, so the work of a step grows
    with its tokens and new blocks, not with the length of its rows. Token intervals of a row, half open:

        [0, num_tokens)                      known: prompt, and tokens of collected dispatches
        [num_tokens, num_tokens + ahead)     being sampled by dispatches in flight, if every draft is accepted
        [0, num_computed)                    computed, or in flight, if every draft is accepted

    `ahead` stays 0 unless the program holds several steps.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        limits: BackendLimits,
        buffers: Sequence[StepBuffers],
        vocab_size: int,
        make_drafter: MakeDrafter | None = None,
        model_dir: str = "",
        guide_process: MakeGuideProcess = GuideProcess,
    ) -> None:
        rows, traits = limits.max_num_seqs, limits.traits
        self._groups = groups
        self._mixed_steps = traits.mixed_steps
        self._samples_on_device = traits.samples_on_device
        self._holds_steps = limits.held_steps > 1
        self.tokens: Int32Array = np.zeros((rows, limits.max_model_len), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(rows, dtype=np.int32)
        self.num_computed: Int32Array = np.zeros(rows, dtype=np.int32)
        self.ahead: Int32Array = np.zeros(rows, dtype=np.int32)
        self.samplers = RowSamplers(self.tokens, vocab_size, traits.max_drafts)
        self.prompt_logprobs = PromptLogprobRows()
        self.log_ids = [""] * rows
        processes = partial(guide_process, model_dir, vocab_size, rows, traits.max_drafts)
        self.guides = RowGuides(processes, self.samplers.masks)
        self._lives: Int32Array = np.zeros(rows, dtype=np.int32)
        self._ones = pack_ids([1] * rows)
        self._every: Int32Array = np.arange(rows, dtype=np.int32)
        layouts = [DispatchLayout(groups, each, traits.padded_rows) for each in buffers]
        self._layouts, self._next_layout = layouts[: limits.held_dispatches], 0
        self._draft_layout = layouts[-1]
        self.tables = [RowTables(rows, list(each)) for each in zip(*(layout.copies for layout in layouts), strict=True)]
        self.drafts = None
        if make_drafter is not None:
            self.drafts = RowDrafts(make_drafter, self.tokens, self._lay_out_drafts, self.samplers.draws)

    def pack_plan(self, plan: StepPlan) -> list[Dispatch]:
        """Apply a plan's differences, and lay out its tokens in one dispatch, or in two if steps are split."""
        for row in id_list(plan.drops):
            self.num_tokens[row] = 0
            self._lives[row] += 1
            self.samplers.clear_row(row)
            self.prompt_logprobs.clear_row(row)
            self.guides.clear(row)
        fresh: list[list[Int32Array]] = [[] for _ in self._groups]
        for new in plan.new_rows:
            self._add(new, fresh)
        for table, data, ids in zip(self.tables, plan.new_blocks, fresh, strict=True):
            if data:
                pairs = unpack_ids(data).reshape(-1, 2)
                table.append_blocks(pairs.tolist())
                ids.append(pairs[:, 1])
        blocks = tuple(np.concatenate(ids) if ids else NONE for ids in fresh)
        dispatches = []
        for part in self._parts(plan):
            dispatches.append(self._dispatch(*part, blocks))
            blocks = (NONE,) * len(blocks)
        return dispatches

    def _add(self, new: NewRow, fresh: list[list[Int32Array]]) -> None:
        tokens = unpack_ids(new.token_ids)
        self.tokens[new.row, : len(tokens)] = tokens
        self.log_ids[new.row] = new.log_id
        self.num_tokens[new.row] = len(tokens)
        self.num_computed[new.row] = new.num_computed
        self.ahead[new.row] = 0
        self._lives[new.row] += 1
        self.samplers.set_row(new.row, new.sampling, new.prompt_len)
        self.prompt_logprobs.set_row(new.row, new.sampling, new.prompt_len)
        if self.drafts is not None:
            self.drafts.start_row(new.row)
        self.guides.clear(new.row)
        if new.sampling.guide is not None:
            self.guides.start(new.row, new.sampling, tokens[new.prompt_len :].tolist())
        for group, table, data, ids in zip(self._groups, self.tables, new.blocks, fresh, strict=True):
            blocks = unpack_ids(data)
            table.set_row(new.row, blocks)
            ids.append(blocks[new.num_computed // group.block_size :])

    def _parts(self, plan: StepPlan) -> Iterator[tuple[DispatchKind, Int32Array, Int32Array, Int32Array | None]]:
        """Yield kind, rows, token counts and drafts of each dispatch. Split decodes from prompt chunks if needed."""
        rows, counts = unpack_ids(plan.rows), unpack_ids(plan.num_tokens)
        drafts = unpack_ids(plan.num_drafts) if plan.num_drafts else None
        if self._mixed_steps or not len(rows):
            is_decode = len(rows) > 0 and plan.num_tokens == self._ones[: len(plan.num_tokens)]
            yield ("decode" if is_decode else "mixed"), rows, counts, drafts
            return
        decodes = counts == 1
        kinds: tuple[tuple[DispatchKind, Int32Array], ...] = (("decode", decodes), ("prefill", ~decodes))
        for kind, chosen in kinds:
            if chosen.any():
                yield kind, rows[chosen], counts[chosen], None if drafts is None else drafts[chosen]

    def _dispatch(
        self,
        kind: DispatchKind,
        rows: Int32Array,
        counts: Int32Array,
        drafts: Int32Array | None,
        fresh: tuple[Int32Array, ...],
    ) -> Dispatch:
        """Lay out `counts` tokens of `rows`, and at most `drafts` more of each row that samples, in order of lines."""
        layout = self._layouts[self._next_layout]
        self._next_layout = (self._next_layout + 1) % len(self._layouts)
        if (order := layout.lines.order(rows)) is not None:
            rows, counts, drafts = rows[order], counts[order], None if drafts is None else drafts[order]
        computed, known, pending = self.num_computed[rows], self.num_tokens[rows], NONE
        if self._holds_steps:
            ahead = self.ahead[rows]
            pending = ahead.nonzero()[0].astype(np.int32)
            known += ahead
        ends = computed + counts
        samples = self._every[: len(rows)]
        if ends.tobytes() != known.tobytes():
            samples = (ends == known).nonzero()[0].astype(np.int32)
        spans = self.prompt_logprobs.take_spans(rows, computed, counts, self.tokens) if self.prompt_logprobs else ()
        if drafts is not None:
            drafts = self._draft(rows, known, drafts, samples, counts)
        if drafts is not None:
            counts = counts + drafts
        part = DispatchRows(kind, rows, counts, computed, samples, drafts, pending, spans)
        inputs = layout.fill(part, self.tokens, self.tables, fresh)
        self.num_computed[rows] = inputs.context_lens[: len(rows)]
        sampling, positions, own = rows, known, drafts
        if len(samples) < len(rows):
            sampling, positions, own = rows[samples], known[samples], None if drafts is None else drafts[samples]
        if self._holds_steps:
            self.ahead[sampling] += 1 if own is None else 1 + own
        lives = self._lives[sampling] if self._holds_steps else None
        logprobs = self.samplers.num_logprobs(sampling) if self._samples_on_device else NONE
        return Dispatch(inputs, sampling, samples, positions, own, logprobs, lives, spans)

    def _lay_out_drafts(self, rows: Int32Array, positions: Int32Array) -> StepInputs:
        """Lay out the token of each of `rows` [n] at `positions` [n], in the buffers of draft layers."""
        every = self._every[: len(rows)]
        part = DispatchRows("decode", rows, np.ones_like(rows), positions, every, None, NONE, ())
        return self._draft_layout.fill(part, self.tokens, self.tables, (NONE,) * len(self._groups))

    def _draft(
        self, rows: Int32Array, known: Int32Array, most: Int32Array, samples: Int32Array, counts: Int32Array
    ) -> Int32Array | None:
        """Return the number of drafts of each row, at most `most`; None if no row has any.

        Only rows that sample have drafts. The host writes them after the rows' known tokens.
        """
        if self._samples_on_device:
            return most
        assert self.drafts is not None, "the Runner refuses drafts of the host without a drafter"
        drafts = np.zeros(len(rows), dtype=np.int32)
        sampling, ends = rows[samples], known[samples]
        expected = self.guides.expected(sampling)
        written = self.drafts.write(sampling, ends, most[samples], int(counts.sum()), expected)
        if written is None:
            return None
        self.guides.draft(sampling, ends, written, self.tokens)
        drafts[samples] = written
        return drafts

    def advance(
        self,
        dispatch: Dispatch,
        counts: Int32Array | None,
        token_ids: Int32Array,
        accepted: Int32Array | None = None,
    ) -> None:
        """Append the sampled tokens of a collected dispatch: `counts` tokens per sampling row, None for one each.

        Drafts after the `accepted` ones were rejected, so their positions are computed again, like the last token of a
        row with count 0. Tokens after the next one are forced, and computed later.
        """
        rows = dispatch.rows
        if counts is None and dispatch.lives is None:
            self._append(rows, dispatch.positions, token_ids)
            return
        if counts is None:
            counts = np.ones(len(rows), dtype=np.int32)
        most = np.ones_like(counts) if dispatch.num_drafts is None else 1 + dispatch.num_drafts
        accepted = np.minimum(counts, most).clip(1) - 1 if accepted is None else accepted
        spare = num_taken_back(most - 1, accepted, counts)
        if dispatch.lives is not None:
            same = dispatch.lives == self._lives[rows]
            token_ids = token_ids[same.repeat(counts)]
            self.ahead[rows[same]] -= most[same]
            rows, counts, spare = rows[same], counts[same], spare[same]
        self.num_computed[rows] -= spare
        starts = self.num_tokens[rows]
        owner = rows.repeat(counts)
        offsets = np.arange(len(owner), dtype=np.int32) - (counts.cumsum() - counts).repeat(counts)
        places = starts.repeat(counts) + offsets
        fits = places < self.tokens.shape[1]
        self.tokens[owner[fits], places[fits]] = token_ids[fits]
        self.num_tokens[rows] = starts + counts

    def still(self, dispatch: Dispatch) -> Int32Array:
        """Return the sampling rows of a dispatch, int32 [n], with -1 for rows that have a new request meanwhile."""
        if dispatch.lives is None:
            return dispatch.rows
        return np.where(dispatch.lives == self._lives[dispatch.rows], dispatch.rows, np.int32(-1))

    def _append(self, rows: Int32Array, ends: Int32Array, token_ids: Int32Array) -> None:
        """Append one token to each row, at position `ends`."""
        try:
            self.tokens[rows, ends] = token_ids
        except IndexError:
            fits = ends < self.tokens.shape[1]
            self.tokens[rows[fits], ends[fits]] = token_ids[fits]
        self.num_tokens[rows] = ends + 1
