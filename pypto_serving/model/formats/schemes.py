"""Storage schemes of a linear layer's matrix: floats, 8 bits, or 4 bits by rows. Torch-free.

A matrix [n, k] has n outputs and k inputs. Its module is called `module`, and its tensors `module.something`. GPTQ and
AWQ have a scheme of their own: gptq_awq.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.kernels import BF16, BLOCK_FORMS, PANEL, planned_form
from pypto_serving.kernels import INT8 as INT8_FORM
from pypto_serving.kernels.constants import FP8_INPUTS
from pypto_serving.model.checkpoint import FLOATS, INT8, Expected, StoredTensor
from pypto_serving.model.formats.values import E8M0_DTYPES, MatrixTensors, as_float32, nibbles
from pypto_serving.types.arrays import Array
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, StoredCodes, StoredFp8, Table
from pypto_serving.util import ceil_div


class Scheme(Protocol):
    """The storage scheme of one matrix."""

    @property
    def name(self) -> str:
        """Return a short name of the scheme for people; "" for weights that are not quantized."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Return, by last component, further tensors that files may contain but serving does not need."""

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        """Return the tensors of a matrix by name. Raises ModelError for sizes that the scheme does not support."""

    @property
    def scale(self) -> str:
        """Return the last component of the name of the tensor of scales, or ""."""

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        """Count the bytes of a matrix packed for the kernels, with n rounded up to half panels.

        `scales` is the stored dtype of its scales, by default the usual one.
        """


class Coded(Scheme, Protocol):
    """A scheme of codes of 4 bits or FP8."""

    def read(self, tensors: MatrixTensors, n: int, k: int) -> StoredCodes | StoredFp8:
        """View a matrix in its mapped files. Raises ModelError for scales that are not numbers."""


@dataclass(frozen=True, slots=True)
class Plain:
    """bfloat16, float16 or float32, which kernels read in bfloat16; or GGUF's blocks."""

    name: str = ""
    extras: tuple[str, ...] = ()
    scale: str = "weight"
    """The tensor whose dtype decides how a matrix is packed."""

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        return {f"{module}.weight": Expected((n, k), blocks=True)}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        return BLOCK_FORMS.get(scales, BF16).planned_bytes(n, k)


PLAIN = Plain()


def held(schemes: Sequence[Scheme], headers: Mapping[str, StoredTensor], module: str, n: int, k: int) -> Scheme:
    """Return the first of `schemes` whose tensors are all in `headers`; if there is none, the first one.

    Quantizers keep a matrix in floats if their scheme does not support its sizes.
    """

    def holds(scheme: Scheme) -> bool:
        try:
            expected = scheme.expected(module, n, k).items()
        except ModelError:
            return False
        return all(name in headers and wanted.allows(headers[name].dtype) for name, wanted in expected)

    return next(filter(holds, schemes), schemes[0])


def packed_bytes(
    scheme: Scheme, headers: Mapping[str, StoredTensor], module: str, n: int, k: int, unit: int = PANEL
) -> int:
    """Count the bytes of a matrix packed for the kernels, with outputs in multiples of `unit`.

    `headers`, if any, have the dtype of its scales.
    """
    scales = headers.get(f"{module}.{scheme.scale}")
    return scheme.packed_bytes(ceil_div(n, unit) * unit, k, "" if scales is None else scales.dtype)


def groups_in(module: str, k: int, group: int, scheme: str) -> int:
    """Count the groups of `group` inputs, 0 for all in one. Raises ModelError unless they fill the `k` inputs."""
    if group and k % group:
        raise ModelError(f"{module} has {k} inputs, which groups of {group} do not fill: {scheme} cannot store that")
    return k // group if group else 1


E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
BLOCK = f"[rows, columns] of a block, columns in multiples of {FP8_INPUTS}"
"""The form of a block in a section, for error messages."""
_OF_INPUTS = ("input_scale", "input_zero_point", "activation_scale")
"""Scales for static quantization of activations, which is not used here."""


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

    `scale` names the tensor of scales, which multiply, also if the name ends in `_inv`. Activations stay bfloat16.
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


_WORD, _BYTE = 8, 2
"""Codes in a stored item of 32 bits, and of 8 bits."""
_NO_ORDER = -1
"""Value of all entries of compressed-tensors' `weight_g_idx` without act-order."""


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
        """Return the form with stored `scales`. F8_E4M3 scales are converted to bfloat16, which is exact."""
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


def int4_name(group: int, zeros: bool) -> str:
    """Return the name, for people, of int4 with a scale per group of inputs, 0 for all."""
    name = f"int4 g{group}" if group else "int4 per output"
    return f"{name} with zero points" if zeros else name


def int4(group: int, zeros: bool) -> RowCodes:
    """Return compressed-tensors' pack-quantized int4."""
    return RowCodes(
        name=int4_name(group, zeros),
        table=Table.INT4,
        group=group,
        codes_dtype="I32",
        zeros=zeros,
        shape=True,
        extras=("weight_g_idx",),
    )


def int4_bytes(group: int) -> RowCodes:
    """Return compressed-tensors' int-quantized int4 (W4A8): one weight in a byte."""
    return RowCodes(
        name=int4_name(group, zeros=False),
        table=Table.INT4,
        group=group,
        codes="weight",
        codes_dtype=INT8,
        layout=Layout.BYTES,
        extras=("weight_g_idx",),
    )


MXFP4 = RowCodes(name="mxfp4", table=Table.E2M1, group=32, scale_dtypes=E8M0_DTYPES)
"""compressed-tensors' mxfp4-pack-quantized."""
DEEPSEEK_FP4 = replace(MXFP4, codes="weight", codes_dtype=INT8, scale="scale", scale_dtypes=(E8M0,), extras=())
"""The experts of DeepSeek V4."""
NVFP4 = RowCodes(
    name="nvfp4",
    table=Table.E2M1,
    group=16,
    scale_dtypes=(E4M3,),
    factor="weight_global_scale",
    divides=True,
)
"""compressed-tensors' nvfp4-pack-quantized, whose global scale divides."""
MODELOPT_NVFP4 = replace(NVFP4, codes="weight", factor="weight_scale_2", divides=False)
"""modelopt's NVFP4, whose global scale multiplies."""
