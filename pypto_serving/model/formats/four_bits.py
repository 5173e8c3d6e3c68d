"""Weights of 4 bits by rows: compressed-tensors' int4, MXFP4 and NVFP4, and DeepSeek V4's fp4. Torch-free.

A byte of a row holds two codes, the even input in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pypto_serving.kernels import planned_form
from pypto_serving.model.checkpoint import FLOATS, INT8, Expected
from pypto_serving.model.formats.bits import as_float32, nibbles
from pypto_serving.model.formats.eight_bits import E4M3, E8M0
from pypto_serving.model.formats.matrix_tensors import E8M0_DTYPES, MatrixTensors
from pypto_serving.model.formats.schemes import groups_in
from pypto_serving.types.arrays import Array
from pypto_serving.types.weights import CodesForm, Layout, StoredCodes, Table

MXFP4_GROUP, NVFP4_GROUP = 32, 16
_WORD, _BYTE = 8, 2
"""Codes in a stored item of 32, and of 8 bits."""
_NO_ORDER = -1
"""What compressed-tensors fills `weight_g_idx` with where there is no act-order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCodes:
    """Codes by rows, times a scale per group of inputs; a group of 0 stands for all inputs.

    codes, codes_dtype: tensor of the codes, which are two in a byte, or one if the layout is BYTES.
    scale, scale_dtypes: tensor of the scales [n, groups].
    zeros: there is `weight_zero_point`, codes packed along outputs.
    factor, divides: tensor of one float32 that multiplies all weights, or divides them.
    shape: there is `weight_shape`, [n, k].
    """

    name: str
    table: Table
    group: int
    codes: str = "weight_packed"
    codes_dtype: str = "U8"
    layout: Layout = Layout.ROWS
    scale: str = "weight_scale"
    scale_dtypes: tuple[str, ...] = FLOATS
    zeros: bool = False
    factor: str = ""
    divides: bool = False
    shape: bool = False
    extras: tuple[str, ...] = ("input_global_scale", "input_scale")

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        groups = groups_in(module, k, self.group, self.name)
        per_item = 1 if self.layout == Layout.BYTES else _WORD if self.codes_dtype == "I32" else _BYTE
        groups_in(module, k, per_item, self.name)
        tensors = {
            self.codes: Expected((n, k // per_item), (self.codes_dtype,)),
            self.scale: Expected(
                (n, groups), self.scale_dtypes, "" if self.scale_dtypes == FLOATS else self.scale_dtypes[0]
            ),
        }
        if self.zeros:
            tensors["weight_zero_point"] = Expected((-(-n // _WORD), groups), ("I32",))
        if self.factor:
            tensors[self.factor] = Expected((1,), ("F32",))
        if self.shape:
            tensors["weight_shape"] = Expected((2,), ("I64", "I32"))
        return {f"{module}.{name}": wanted for name, wanted in tensors.items()}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        usual = "BF16" if self.scale_dtypes == FLOATS else self.scale_dtypes[0]
        return planned_form(self._form(k, scales or usual), n, k).planned_bytes(n, k)

    def read(self, tensors: MatrixTensors, n: int, k: int) -> StoredCodes:
        if self.shape and (found := tensors.view("weight_shape").tolist()) != [n, k]:
            tensors.refuse("weight_shape", f"says {found}, but config.json makes it {[n, k]}")
        tensors.require_order("weight_g_idx", k, self.group or k, _NO_ORDER)
        codes, zeros = tensors.view(self.codes), None
        if self.layout != Layout.BYTES:
            codes = codes.view(np.uint8)
        if self.zeros:
            zeros = np.ascontiguousarray(nibbles(tensors.view("weight_zero_point").T)[:, :n].T)
        form = self._form(k, tensors.dtype(self.scale))
        return StoredCodes(form, self.layout, codes, self._scales(tensors), zeros, self._factor(tensors))

    def _form(self, k: int, scales: str) -> CodesForm:
        """Return the form with stored `scales`. Those in F8_E4M3 become bfloat16, which is exact."""
        dtype = "BF16" if scales == E4M3 else E8M0 if scales in E8M0_DTYPES else scales
        return CodesForm(self.table, self.group or k, dtype, self.zeros)

    def _scales(self, tensors: MatrixTensors) -> Array:
        scales, dtype = tensors.scales(self.scale), tensors.dtype(self.scale)
        return (as_float32(scales, dtype).view(np.uint32) >> 16).astype(np.uint16) if dtype == E4M3 else scales

    def _factor(self, tensors: MatrixTensors) -> float:
        if not self.factor:
            return 1.0
        value = tensors.float32(self.factor).reshape(1)
        if self.divides and value[0] == 0:
            tensors.refuse(self.factor, "is 0, and weights would be divided by it")
        return float(np.float32(1) / value[0] if self.divides else value[0])


def int4(group: int, zeros: bool) -> RowCodes:
    """Return compressed-tensors' pack-quantized int4."""
    name = f"int4 g{group}" if group else "int4 per output"
    return RowCodes(
        name=f"{name} with zero points" if zeros else name,
        table=Table.INT4,
        group=group,
        codes_dtype="I32",
        zeros=zeros,
        shape=True,
        extras=("weight_g_idx",),
    )


def int4_bytes(group: int) -> RowCodes:
    """Return compressed-tensors' int-quantized int4 (W4A8): one weight in a byte."""
    name = f"int4 g{group}" if group else "int4 per output"
    return RowCodes(
        name=name,
        table=Table.INT4,
        group=group,
        codes="weight",
        codes_dtype=INT8,
        layout=Layout.BYTES,
        extras=("weight_g_idx",),
    )


MXFP4 = RowCodes(name="mxfp4", table=Table.E2M1, group=MXFP4_GROUP, scale_dtypes=E8M0_DTYPES)
"""compressed-tensors' mxfp4-pack-quantized."""
DEEPSEEK_FP4 = replace(MXFP4, codes="weight", codes_dtype=INT8, scale="scale", scale_dtypes=(E8M0,), extras=())
"""The experts of DeepSeek V4."""
NVFP4 = RowCodes(
    name="nvfp4",
    table=Table.E2M1,
    group=NVFP4_GROUP,
    scale_dtypes=(E4M3,),
    factor="weight_global_scale",
    divides=True,
)
"""compressed-tensors' nvfp4-pack-quantized, whose global scale divides."""
MODELOPT_NVFP4 = replace(NVFP4, codes="weight", factor="weight_scale_2", divides=False)
"""modelopt's, whose global scale multiplies."""
