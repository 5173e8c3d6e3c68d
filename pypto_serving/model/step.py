"""One step as torch programs see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step over r rows and t tokens, rows packed one after the other; all int64, see StepInputs.

    token_ids, positions [t]; query_start [r + 1]; context_lens [r]; logits_rows [s]; slots[g] [t];
    block_tables[g] [r, n]. Tokens behind query_start[r] are padding: they belong to no row and lie in the null
    block. The last of logits_rows may be padding too.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    logits_rows: Tensor
    slots: tuple[Tensor, ...]
    block_tables: tuple[Tensor, ...]
