"""Sample on an engine's threads, without sorting the vocabulary: csrc/sampling.h."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.engine import Engine
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import DRAW, Logprobs


class NativeSampler:
    """Implements Sampler with the kernels of `engine`. Logits are read in place; their rows may lie apart."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lib = engine, engine._lib

    def choose(self, logits: Float32Array, draws: NDArray[np.void]) -> Int32Array:
        """Implement Sampler. Raises ValueError for arrays of other shapes or dtypes."""
        stride, (rows, vocab) = _stride(logits), logits.shape
        if draws.dtype != DRAW or draws.shape != (rows,):
            raise ValueError(f"{rows} rows of logits need as many draws, not {draws.dtype} {draws.shape}")
        draws, tokens = np.ascontiguousarray(draws), np.empty(rows, np.int32)
        sizes = {"stride": stride, "vocab": vocab, "rows": rows}
        self._lib.sample(self._engine._handle, logits=logits[:1], **sizes, draws=draws, tokens=tokens)
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


def _stride(logits: Float32Array) -> int:
    """Return the floats from one row to the next."""
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0 or logits.strides[1] != 4:
        raise ValueError(f"logits must be float32 [rows, vocab] in order of id, not {logits.dtype} {logits.shape}")
    return logits.strides[0] // 4
