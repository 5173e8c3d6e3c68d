"""A model whose logits are a function of what it reads back from the pages: quick, for tests of the program."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pypto_serving.backend.cuda.program import CardModel
from pypto_serving.kernels.cuda.launch import run
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages
from pypto_serving.types.config import EngineConfig

PRIME = 1_000_003


class HashModel(CardModel):
    """Writes a number for each token to its slot, and hashes those of a context. Free blocks are poisoned by nobody,
    so what a wrong table reads is another answer."""

    tile_queries = 4

    def __init__(self, config: EngineConfig) -> None:
        blocks, size = config.cache.num_blocks[0], config.cache.groups[0].block_bytes // 2
        self._tokens = config.cache.groups[0].block_size
        self._vocab = config.model.vocab_size
        data = torch.zeros(blocks * size, dtype=torch.bfloat16)
        self.pages = KVPages(data, blocks, 1, 1, 1, self._tokens)
        self._numbers = data.view(torch.int16).view(blocks, size)[:, : 2 * self._tokens].view(torch.int32)
        rows = max(config.limits.traits.padded_rows)
        self.logits = torch.zeros(rows, self._vocab)
        self._states = torch.zeros(max(rows, config.limits.max_num_batched_tokens), dtype=torch.int64)

    def compute_layers(self, step: DispatchTensors, last_tokens: Tensor) -> None:
        run(partial(self._compute_layers, step, last_tokens))

    def compute_logits(self, rows: Tensor) -> None:
        run(partial(self._compute_logits, rows))

    def _compute_layers(self, step: DispatchTensors, last_tokens: Tensor) -> None:
        known, sampled = step.token_ids, last_tokens[(-1 - step.token_ids).clamp(min=0).long()]
        ids = torch.where(known < 0, sampled.clamp(min=0), known).long()
        values = ids * 7919 + step.positions.long() * 104_729 + 1
        slots = step.slots.long()
        self._numbers[slots // self._tokens, slots % self._tokens] = (values % PRIME).int()
        for row, first, last in self._queries(step):
            for token in range(first, last):
                length = int(step.context_lens[row]) - (last - 1 - token)
                positions = torch.arange(length)
                blocks = step.block_tables[row][positions // self._tokens].long()
                numbers = self._numbers[blocks, positions % self._tokens].long()
                self._states[token] = int((numbers * (positions + 3)).sum()) % PRIME

    def _queries(self, step: DispatchTensors) -> list[tuple[int, int, int]]:
        """The tokens of each row: one for decodes, those of its tiles for chunks."""
        if step.num_splits:
            return [(row, row, row + 1) for row in range(step.num_rows)]
        rows = sorted({row for row in step.tiles[:, 0].tolist() if row >= 0})
        starts = step.query_start.tolist()
        return [(row, starts[row], starts[row + 1]) for row in rows]

    def _compute_logits(self, rows: Tensor) -> None:
        states = self._states[rows.long()][:, None].double()
        self.logits[: len(rows)] = torch.sin(states * (torch.arange(self._vocab) + 1.5)).float() * 4
