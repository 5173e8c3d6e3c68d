"""Weights of 4 bits by columns: GPTQ and AWQ, int4 packed into words of 32 bits. Torch-free.

    GPTQ  qweight [k / 8, n]: bits 4 i of word [r, c] hold input 8 r + i of output c
    AWQ   qweight [k, n / 8]: bits 4 i of word [r, c] hold input r of output 8 c + AWQ_ORDER[i]

Both have scales [groups, n] and zero points [groups, n / 8], packed along outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.kernels import planned_form
from pypto_serving.model.checkpoint import FLOATS, Expected
from pypto_serving.model.formats.bits import AWQ_ORDER, nibbles
from pypto_serving.model.formats.matrix_tensors import MatrixTensors
from pypto_serving.model.formats.schemes import groups_in
from pypto_serving.types.arrays import UInt8Array
from pypto_serving.types.weights import CodesForm, Layout, StoredCodes, Table

_WORD = 8
_CENTRE = 8
"""The zero point of symmetric weights."""
_ONES = np.uint32(0x11111111)
"""What GPTQModel adds to the words of version 1. A zero point of 0 was written as 15, borrowing from the next."""


@dataclass(frozen=True, slots=True)
class Columns:
    """int4 by columns; a group of 0 stands for all inputs.

    zeros: zero points differ; else all are 8.
    less_one: stored zero points are less by 1, in version 1 of GPTQ.
    """

    layout: Layout
    group: int
    zeros: bool
    less_one: bool = False

    scale = "scales"

    @property
    def name(self) -> str:
        name = f"int4 g{self.group}" if self.group else "int4 per output"
        return f"{name} with zero points" if self.zeros else name

    @property
    def extras(self) -> tuple[str, ...]:
        return ("g_idx", "bias") if self.layout == Layout.GPTQ else ("bias",)

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        groups = groups_in(module, k, self.group, self.name)
        if n % _WORD:
            raise ModelError(f"{module} has {n} outputs, but {self.name} by columns stores multiples of {_WORD}")
        words = (k // _WORD, n) if self.layout == Layout.GPTQ else (k, n // _WORD)
        tensors = {
            "qweight": Expected(words, ("I32",)),
            "qzeros": Expected((groups, n // _WORD), ("I32",)),
            self.scale: Expected((groups, n), FLOATS, "F16"),
        }
        return {f"{module}.{name}": wanted for name, wanted in tensors.items()}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        return planned_form(self._form(k, scales or "F16"), n, k).planned_bytes(n, k)

    def read(self, tensors: MatrixTensors, n: int, k: int) -> StoredCodes:
        tensors.require_order("g_idx", k, self.group or k)
        tensors.require_zeros("bias", n)
        scales = np.ascontiguousarray(tensors.scales(self.scale).T)
        zeros = self._zeros(tensors, n)
        form = self._form(k, tensors.dtype(self.scale))
        return StoredCodes(form, self.layout, tensors.view("qweight"), scales, zeros, 1.0)

    def _form(self, k: int, scales: str) -> CodesForm:
        return CodesForm(Table.INT4, self.group or k, scales, self.zeros)

    def _zeros(self, tensors: MatrixTensors, n: int) -> UInt8Array | None:
        """Unpack zero points to [n, groups]; None for symmetric weights."""
        words = tensors.view("qzeros").view(np.uint32)
        zeros = nibbles(words + _ONES if self.less_one else words)
        if self.layout == Layout.AWQ:
            zeros = zeros.reshape(len(zeros), -1, _WORD)[:, :, np.argsort(AWQ_ORDER)].reshape(len(zeros), -1)
        zeros = np.ascontiguousarray(zeros[:, :n].T)
        if self.zeros:
            return zeros
        odd = zeros[zeros != _CENTRE]
        if len(odd):
            tensors.refuse("qzeros", f"has zero point {odd[0]}, but sym is true, which makes all {_CENTRE}")
        return None
