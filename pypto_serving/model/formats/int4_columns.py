"""Sections of GPTQ, AWQ and auto-round: int4 packed by columns. Torch-free.

Sources: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ,
https://github.com/intel/auto-round. Their lists of modules are incomplete, so files decide where they can: a matrix
that is stored in floats is not quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pypto_serving.kernels.constants import SCALED
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.columns import Columns
from pypto_serving.model.formats.modules import EVERY, Modules, by_part, names_in
from pypto_serving.model.formats.patterns import pattern
from pypto_serving.model.formats.quantization import SECTION, Quantization, Rule, refuse, require
from pypto_serving.model.formats.schemes import PLAIN, Scheme
from pypto_serving.types.weights import Layout

_ROUTER = "mlp.gate"
_VERSIONS = {None: 1, "gptq": 1, "gptq_v2": 2}
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_GPTQ_KEYS = ("bits", "group_size", "sym")


def read_gptq(section: Fields) -> Quantization:
    """Read a section of GPTQ. Act-order is not refused here, but by its tensor `g_idx`."""
    refuse(section, ("is_marlin_format",))
    version = _VERSIONS[require(section, "checkpoint_format", tuple(_VERSIONS))]
    require(section, "pack_dtype", ("int32", None))
    require(section, "bits", (4,))
    head = section.flag("lm_head", False)
    rules = [Rule(by_part([_ROUTER] if head else [_ROUTER, "lm_head"]), (PLAIN,))]
    overrides = section.get("dynamic") or {}
    section.require(isinstance(overrides, Mapping), f"{SECTION}.dynamic", overrides, "an object")
    for key, values in overrides.items():
        rules.insert(len(rules) - 1, _override(section, key, values, version))
    return Quantization((*rules, Rule(EVERY, (_gptq(section, "", version),))))


def _override(section: Fields, key: str, values: object, version: int) -> Rule:
    """Read an entry of `dynamic`: `-:pattern` for modules left out, `+:pattern` or a pattern for other values."""
    path = f"{SECTION}.dynamic"
    modules = Modules(patterns=(pattern(key.removeprefix("+:").removeprefix("-:"), path, key),))
    if key.startswith("-:"):
        return Rule(modules, (PLAIN,))
    section.require(isinstance(values, dict), f"{path}.{key}", values, "an object")
    assert isinstance(values, dict)
    merged = {name: values.get(name, section.get(name)) for name in _GPTQ_KEYS}
    return Rule(modules, (_gptq(Fields(merged, section.source), f"dynamic.{key}.", version),))


def _gptq(fields: Fields, path: str, version: int) -> Scheme:
    require(fields, "bits", (4,), path)
    symmetric = require(fields, "sym", (True, False, None), path)
    return Columns(Layout.GPTQ, _group(fields, path), zeros=symmetric is False, less_one=version == 1)


def read_awq(section: Fields) -> Quantization:
    """Read a section of AWQ."""
    require(section, "version", ("gemm", "GEMM", None))
    bits, group = (
        old if section.get(new) is None else new for old, new in (("w_bit", "bits"), ("q_group_size", "group_size"))
    )
    require(section, bits, (4,))
    require(section, "zero_point", (True, None))
    left_out = by_part([_ROUTER, "lm_head", *names_in(section, SECTION, "modules_to_not_convert")])
    scheme = Columns(Layout.AWQ, _group(section, "", group), zeros=True)
    return Quantization((Rule(left_out, (PLAIN,)), Rule(EVERY, (scheme,))))


def read_auto_round(section: Fields) -> Quantization:
    """Read a section of auto-round, which packs as GPTQ or as AWQ does."""
    packing = require(section, "packing_format", _PACKINGS)
    require(section, "bits", (4,))
    require(section, "data_type", ("int", None))
    symmetric, group = require(section, "sym", (True, False, None)) is not False, _group(section, "")
    if packing.endswith("awq"):
        scheme: Scheme = Columns(Layout.AWQ, group, zeros=not symmetric)
    else:
        scheme = Columns(Layout.GPTQ, group, zeros=not symmetric, less_one=True)
    rules = [*_extra(section), Rule(by_part([_ROUTER, "lm_head"]), (PLAIN,)), Rule(EVERY, (scheme,))]
    return Quantization(tuple(rules))


def _extra(section: Fields) -> list[Rule]:
    """Read `extra_config`, modules of other bits: those with 16 are not quantised, others are refused."""
    extra: Any = section.get("extra_config") or {}
    section.require(isinstance(extra, Mapping), f"{SECTION}.extra_config", extra, "an object")
    plain = []
    for name, values in extra.items():
        bits = values.get("bits") if isinstance(values, Mapping) else None
        section.require(bits in (4, 16, 32, None), f"{SECTION}.extra_config.{name}.bits", bits, "4, 16 or 32")
        plain += [name] if bits in (16, 32) else []
    return [Rule(by_part(plain), (PLAIN,))] if plain else []


def _group(fields: Fields, path: str, key: str = "group_size") -> int:
    """Return the inputs of a group, 0 for one scale per output."""
    size = fields.get(key)
    known = size == -1 or (isinstance(size, int) and size > 0 and (size in (32, 64) or size % SCALED == 0))
    fields.require(known, f"{SECTION}.{path}{key}", size, f"-1, 32, 64 or a multiple of {SCALED}")
    return 0 if size == -1 else int(size)
