"""Weights of 8 bits: int8 with a scale per output, and FP8 with a scale per block, output or matrix. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.kernels import INT8 as INT8_FORM
from pypto_serving.kernels import planned_form
from pypto_serving.kernels.constants import FP8_INPUTS
from pypto_serving.model.checkpoint import FLOATS, INT8, Expected
from pypto_serving.model.formats.matrix_tensors import MatrixTensors
from pypto_serving.types.weights import Fp8Form, StoredFp8
from pypto_serving.util import ceil_div

E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
BLOCK = f"[rows, columns] of a block, columns in multiples of {FP8_INPUTS}"
"""What a section may say of blocks, for people."""
_OF_INPUTS = ("input_scale", "input_zero_point", "activation_scale")
"""Scales of static activations, which are not quantised that way here."""


@dataclass(frozen=True, slots=True)
class Int8:
    """W8A8: int8 weights times a scale per output; activations become int8 per token.

    `weight_scale` is [n, 1]. DeepSeek V4's is called `scale`, and is float32 [n].
    """

    scale: str = "weight_scale"

    name = "w8a8"
    extras = ()

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        scales = Expected((n, 1)) if self.scale == "weight_scale" else Expected((n,), usual="F32")
        return {f"{module}.weight": Expected((n, k), (INT8,)), f"{module}.{self.scale}": scales}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        return INT8_FORM.planned_bytes(n, k)


@dataclass(frozen=True, slots=True)
class Fp8:
    """F8_E4M3 weights times the scale of their block of (rows, columns); 0 stands for all.

    `scale` names the tensor of scales, which multiply under every name. Activations stay bfloat16.
    """

    block: tuple[int, int]
    scale: str = "weight_scale"
    dtypes: tuple[str, ...] = FLOATS
    usual: str = ""

    extras = _OF_INPUTS

    @property
    def name(self) -> str:
        rows, columns = self.block
        return f"fp8 {rows}x{columns}" if columns else "fp8 per output" if rows else "fp8 per matrix"

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        shape = self._scales(n, k) if any(self.block) else (1,)
        scales = Expected(shape, self.dtypes, self.usual)
        return {f"{module}.weight": Expected((n, k), (E4M3,)), f"{module}.{self.scale}": scales}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        return planned_form(self._form(n, k), n, k).planned_bytes(n, k)

    def read(self, tensors: MatrixTensors, n: int, k: int) -> StoredFp8:
        scales = np.ascontiguousarray(tensors.float32(self.scale).reshape(self._scales(n, k)))
        return StoredFp8(self._form(n, k), tensors.view("weight"), scales)

    def _form(self, n: int, k: int) -> Fp8Form:
        return Fp8Form((self.block[0] or n, self.block[1] or k))

    def _scales(self, n: int, k: int) -> tuple[int, int]:
        return ceil_div(n, self.block[0] or n), ceil_div(k, self.block[1] or k)
