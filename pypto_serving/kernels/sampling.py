"""Sample on an engine's threads, without sorting the vocabulary; see csrc/sampling.h."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.engine import Engine
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.sampler import DRAW, LogitAdjustments, Logprobs


class NativeSampler:
    """Implements Sampler with the kernels of `engine`. Logits are read in place; their rows need not be contiguous."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lib = engine, engine._lib

    def choose(
        self, logits: Float32Array, draws: NDArray[np.void], adjustments: LogitAdjustments | None = None
    ) -> Int32Array:
        """Implement Sampler. Raises ValueError for arrays of other shapes or dtypes."""
        stride, (rows, vocab) = _stride(logits), logits.shape
        if draws.dtype != DRAW or draws.shape != (rows,):
            raise ValueError(f"{rows} rows of logits need as many draws, not {draws.dtype} {draws.shape}")
        draws, tokens = np.ascontiguousarray(draws), np.empty(rows, np.int32)
        sample = {
            "logits": logits[:1],
            "stride": stride,
            "vocab": vocab,
            "rows": rows,
            "draws": draws,
            "chosen": tokens,
        }
        if adjustments is None:
            self._lib.sample(self._engine._handle, **sample)
        else:
            self._lib.sample_adjusted(self._engine._handle, **sample, **_fields(adjustments, rows, vocab))
        return tokens

    def logprobs(self, logits: Float32Array, rows: Int32Array, tokens: Int32Array, width: int) -> Logprobs:
        """Implement Sampler. Raises ValueError for arrays of other shapes or dtypes."""
        stride, count, vocab = _stride(logits), len(rows), logits.shape[1]
        for name, array, most in (("rows", rows, len(logits)), ("tokens", tokens, vocab)):
            if array.shape != (count,) or (count and not 0 <= array.min() <= array.max() < most):
                raise ValueError(f"{name} must be {count} numbers below {most}")
        rows, tokens = (np.ascontiguousarray(array, np.int32) for array in (rows, tokens))
        width = min(width, vocab)
        found = Logprobs.empty(count, width)
        inputs = {"logits": logits[:1], "rows": rows, "tokens": tokens}
        sizes = {"stride": stride, "vocab": vocab, "count": count, "width": width}
        best = {"best": found.best_ids, "best_values": found.best_values}
        self._lib.logprobs(self._engine._handle, **inputs, **sizes, values=found.values, ranks=found.ranks, **best)
        return found


def _fields(given: LogitAdjustments, rows: int, vocab: int) -> dict[str, Any]:
    """Return the fields of AdjustedSample that Sample does not have."""
    table, mask_words = given.table, given.masks.shape[1]
    for name, array in (("rows", given.rows), ("positions", given.positions), ("mask_rows", given.mask_rows)):
        if array.shape != (rows,):
            raise ValueError(f"{rows} rows of logits need as many {name} of adjustments, not {array.shape}")
    if mask_words * 32 < vocab and given.mask_rows.max(initial=-1) >= 0:
        raise ValueError(f"masks have {mask_words} words, too few for {vocab} logits")
    return {
        "changed": given.rows,
        "positions": np.ascontiguousarray(given.positions, np.int32),
        "mask_rows": given.mask_rows,
        "changes": table.changes,
        "tokens": given.tokens,
        "most_tokens": given.tokens.shape[1],
        "bias_ids": table.bias_ids,
        "bias_values": table.bias_values,
        "banned_ids": table.banned_ids,
        "word_starts": table.word_starts,
        "words": table.words,
        "masks": given.masks,
        "mask_words": mask_words,
    }


def _stride(logits: Float32Array) -> int:
    """Return the distance between rows, in floats."""
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0 or logits.strides[1] != 4:
        raise ValueError(f"logits must be float32 [rows, vocab] in order of id, not {logits.dtype} {logits.shape}")
    return logits.strides[0] // 4
