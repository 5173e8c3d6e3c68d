"""GPTQ, AWQ and auto-round: their sections, and weights of 4 bits by columns, int4 in 32-bit words. Torch-free.

    GPTQ  qweight [k / 8, n]: bits 4 i of word [r, c] hold input 8 r + i of output c
    AWQ   qweight [k, n / 8]: bits 4 i of word [r, c] hold input r of output 8 c + AWQ_ORDER[i]

Both have scales [groups, n] and zero points [groups, n / 8], packed along outputs.

Sources: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ,
https://github.com/intel/auto-round. Their lists of modules are incomplete, so the files decide if they are present: a
matrix that is stored in floats is not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.kernels import planned_form
from pypto_serving.kernels.constants import SCALED
from pypto_serving.model.checkpoint import FLOATS, Expected
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.quantization import (
    EVERY,
    SECTION,
    Modules,
    Quantization,
    SchemeRule,
    by_part,
    names_in,
    pattern,
    refuse,
    require,
)
from pypto_serving.model.formats.schemes import PLAIN, Scheme, groups_in, int4_name
from pypto_serving.model.formats.values import AWQ_ORDER, MatrixTensors, nibbles
from pypto_serving.types.arrays import UInt8Array
from pypto_serving.types.weights import CodesForm, Layout, StoredCodes, Table

_WORD = 8
_CENTRE = 8
"""The zero point of symmetric weights."""
_ONES = np.uint32(0x11111111)
"""GPTQModel adds this to the words of version 1, in which a zero point of 0 was written as 15, with a borrow."""
_ROUTER = "gate"
_VERSIONS = {None: 1, "gptq": 1, "gptq_v2": 2}
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_GPTQ_KEYS = ("bits", "group_size", "sym")


@dataclass(frozen=True, slots=True)
class ColumnCodes:
    """int4 by columns; a group of 0 means all inputs.

    zeros: zero points are stored; otherwise all are 8.
    less_one: stored zero points are smaller by 1, as in version 1 of GPTQ.
    """

    layout: Layout
    group: int
    zeros: bool
    less_one: bool = False

    scale = "scales"

    @property
    def name(self) -> str:
        return int4_name(self.group, self.zeros)

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


def read_gptq(section: Fields) -> Quantization:
    """Read a section of GPTQ. Act-order is not refused here, but when its tensor `g_idx` is read."""
    refuse(section, ("is_marlin_format",))
    version = _VERSIONS[require(section, "checkpoint_format", tuple(_VERSIONS))]
    require(section, "pack_dtype", ("int32", None))
    require(section, "bits", (4,))
    head = section.flag("lm_head", False)
    rules = [SchemeRule(by_part([_ROUTER] if head else [_ROUTER, "lm_head"]), (PLAIN,))]
    overrides = section.get("dynamic") or {}
    section.require(isinstance(overrides, Mapping), f"{SECTION}.dynamic", overrides, "an object")
    for key, values in overrides.items():
        rules.insert(len(rules) - 1, _override(section, key, values, version))
    return Quantization((*rules, SchemeRule(EVERY, (_gptq(section, "", version),))))


def _override(section: Fields, key: str, values: object, version: int) -> SchemeRule:
    """Read an entry of `dynamic`: `-:pattern` for modules left out, `+:pattern` or a pattern for other values."""
    path = f"{SECTION}.dynamic"
    modules = Modules(patterns=(pattern(key.removeprefix("+:").removeprefix("-:"), path, key),))
    if key.startswith("-:"):
        return SchemeRule(modules, (PLAIN,))
    section.require(isinstance(values, dict), f"{path}.{key}", values, "an object")
    assert isinstance(values, dict)
    merged = {name: values.get(name, section.get(name)) for name in _GPTQ_KEYS}
    return SchemeRule(modules, (_gptq(Fields(merged, section.source), f"dynamic.{key}.", version),))


def _gptq(fields: Fields, path: str, version: int) -> Scheme:
    require(fields, "bits", (4,), path)
    symmetric = require(fields, "sym", (True, False, None), path)
    return ColumnCodes(Layout.GPTQ, _group(fields, path), zeros=symmetric is False, less_one=version == 1)


def read_awq(section: Fields) -> Quantization:
    """Read a section of AWQ."""
    require(section, "version", ("gemm", "GEMM", None))
    bits, group = (
        old if section.get(new) is None else new for old, new in (("w_bit", "bits"), ("q_group_size", "group_size"))
    )
    require(section, bits, (4,))
    require(section, "zero_point", (True, None))
    left_out = by_part([_ROUTER, "lm_head", *names_in(section, SECTION, "modules_to_not_convert")])
    scheme = ColumnCodes(Layout.AWQ, _group(section, "", group), zeros=True)
    return Quantization((SchemeRule(left_out, (PLAIN,)), SchemeRule(EVERY, (scheme,))))


def read_auto_round(section: Fields) -> Quantization:
    """Read a section of auto-round, which packs like GPTQ or AWQ."""
    packing = require(section, "packing_format", _PACKINGS)
    require(section, "bits", (4,))
    require(section, "data_type", ("int", None))
    symmetric, group = require(section, "sym", (True, False, None)) is not False, _group(section, "")
    if packing.endswith("awq"):
        scheme: Scheme = ColumnCodes(Layout.AWQ, group, zeros=not symmetric)
    else:
        scheme = ColumnCodes(Layout.GPTQ, group, zeros=not symmetric, less_one=True)
    rules = [*_extra(section), SchemeRule(by_part([_ROUTER, "lm_head"]), (PLAIN,)), SchemeRule(EVERY, (scheme,))]
    return Quantization(tuple(rules))


def _extra(section: Fields) -> list[SchemeRule]:
    """Read `extra_config`, modules of other bits: those with 16 are not quantised, others are refused."""
    extra: Any = section.get("extra_config") or {}
    section.require(isinstance(extra, Mapping), f"{SECTION}.extra_config", extra, "an object")
    plain = []
    for name, values in extra.items():
        bits = values.get("bits") if isinstance(values, Mapping) else None
        section.require(bits in (4, 16, 32, None), f"{SECTION}.extra_config.{name}.bits", bits, "4, 16 or 32")
        plain += [name] if bits in (16, 32) else []
    return [SchemeRule(by_part(plain), (PLAIN,))] if plain else []


def _group(fields: Fields, path: str, key: str = "group_size") -> int:
    """Return the inputs of a group, 0 for one scale per output."""
    size = fields.get(key)
    known = size == -1 or (isinstance(size, int) and size > 0 and (size in (32, 64) or size % SCALED == 0))
    fields.require(known, f"{SECTION}.{path}{key}", size, f"-1, 32, 64 or a multiple of {SCALED}")
    return 0 if size == -1 else int(size)
