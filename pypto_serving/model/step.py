"""The inputs of one step of a torch program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step over r packed rows and t tokens, all int64; see StepInputs.

    token_ids, positions [t]; query_start [r + 1]; context_lens [r]; logits_rows [s]; slots[g] [t];
    block_tables[g] [r, n]. Tokens from query_start[r] on are padding: they belong to no row and lie in the null
    block. The end of logits_rows may be padding too.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    logits_rows: Tensor
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
