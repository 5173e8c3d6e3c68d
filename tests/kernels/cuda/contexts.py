"""Contexts of rows in KV pages, and attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages, tiles_of_chunks
from pypto_serving.util import ceil_div
from tests.kernels.cuda.devices import DEVICE

LAYER = 1
NO_IDS = torch.empty(0, dtype=torch.int32, device=DEVICE)


def int32(values: object) -> Tensor:
    return torch.tensor(np.array(values), dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error; infinite if anything is not finite."""
    difference = float((found.double() - expected).norm() / expected.norm())
    return difference if difference == difference else float("inf")


def step_tensors(**fields: object) -> DispatchTensors:
    """Return inputs of which a kernel reads `fields` only."""
    unread = {name: NO_IDS for name in DispatchTensors.__dataclass_fields__ if name != "num_splits"}
    return DispatchTensors(**{**unread, "num_splits": 0, **fields})  # type: ignore[arg-type]


class Contexts:
    """Keys and values of `lengths` positions, a row each, in scattered blocks; everything else is NaN."""

    def __init__(self, lengths: Sequence[int], kv_heads: int, head_dim: int, block_size: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        counts = [ceil_div(length, block_size) for length in lengths]
        ids = generator.permutation(sum(counts)) + 1
        spare = sum(counts) + 1
        shape = 2 * (spare + 1) * 2 * kv_heads * block_size * head_dim
        self.lengths = tuple(lengths)
        self.pages = KVPages(poisoned(shape), spare + 1, 2, kv_heads, head_dim, block_size)
        self.tables = np.full((len(lengths), max(counts) + 1), spare, np.int32)
        self.keys, self.values = [], []
        for row, (length, blocks) in enumerate(zip(lengths, np.split(ids, np.cumsum(counts)[:-1]), strict=True)):
            self.tables[row, : len(blocks)] = blocks
            both = random(length, 2, kv_heads, head_dim, seed=seed * 1000 + row)
            for i, block in enumerate(blocks):
                part = both[i * block_size : (i + 1) * block_size]
                self.pages.view()[block, LAYER, :, :, : len(part)] = part.permute(1, 2, 0, 3)
            self.keys.append(both[:, 0])
            self.values.append(both[:, 1])

    def decodes(self, rows: Sequence[int], num_splits: int) -> DispatchTensors:
        """Return the inputs of a dispatch with the last query of `rows`."""
        lengths = [self.lengths[row] for row in rows]
        return step_tensors(
            context_lens=int32(lengths), block_tables=int32(self.tables[list(rows)]), num_splits=num_splits
        )

    def chunks(self, rows: Sequence[int], counts: Sequence[int], ends: Sequence[int], queries: int) -> DispatchTensors:
        """Return the inputs of a dispatch with `counts` queries of `rows` before positions `ends`, and an idle tile."""
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        num_tiles = sum(ceil_div(count, queries) for count in counts) + 1
        return step_tensors(
            query_start=int32(query_start),
            context_lens=int32(ends),
            block_tables=int32(self.tables[list(rows)]),
            tiles=int32(tiles_of_chunks(query_start, np.array(ends, np.int32), queries, num_tiles)),
        )

    def attend(self, q: Tensor, row: int, end: int, window: int = 0) -> Tensor:
        """Attend in float64 with queries [n, heads, head_dim] at the n positions before `end`."""
        group = q.shape[1] // self.pages.num_kv_heads
        keys, values = (both[row][:end].double().repeat_interleave(group, 1) for both in (self.keys, self.values))
        scores = torch.einsum("nhd,thd->hnt", q.double(), keys) * q.shape[2] ** -0.5
        ages = torch.arange(end - len(q), end, device=DEVICE)[:, None] - torch.arange(end, device=DEVICE)
        hidden = (ages < 0) | (ages >= (window or end))
        return torch.einsum("hnt,thd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
