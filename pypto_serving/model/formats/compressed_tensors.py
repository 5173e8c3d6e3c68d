"""Sections of compressed-tensors, which llm-compressor and `convert` write. Torch-free.

Format: https://github.com/vllm-project/compressed-tensors. Groups name the modules that they cover; each has a format,
or the section has one for all. What activations are rounded to matters for int8 weights alone: others are served with
activations that are at least as fine as the checkpoint wants them. What the KV cache is rounded to is left to options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

from pypto_serving.kernels.constants import FP8_INPUTS
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.quantization import (
    CLASS,
    SECTION,
    Quantization,
    SchemeRule,
    by_name_or_pattern,
    names_in,
    refuse,
    require,
)
from pypto_serving.model.formats.schemes import (
    BLOCK,
    MXFP4,
    NVFP4,
    PLAIN,
    Fp8,
    Int8,
    RowCodes,
    Scheme,
    int4,
    int4_bytes,
)

_MIXED = "mixed-precision"
_SIZE = re.compile(r"[1-9][0-9]{0,8}")
_GROUPS_OF_INT4 = (32, 64, 128)
_INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def read(section: Fields) -> Quantization:
    """Read the section `quantization_config`. Raises ModelError naming the field of another scheme."""
    format = require(section, "format", (*_FORMATS, _MIXED))
    require(section, "quantization_status", ("compressed", "frozen", None))
    refuse(section, ("transform_config",))
    sparsity = section.get("sparsity_config")
    if not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        refuse(section, ("sparsity_config",))
    groups = section.section("config_groups")
    names = list(section.get("config_groups") or {})
    section.require(bool(names), f"{SECTION}.config_groups", section.get("config_groups"), "one group or more")
    rules = [rule for name in names for rule in _read_group(groups, name, format)]
    ignored = by_name_or_pattern(names_in(section, SECTION, "ignore"), f"{SECTION}.ignore")
    # Targets that are names take precedence over patterns, and patterns over the class.
    return Quantization((SchemeRule(ignored, (PLAIN,)), *(rule for _, rule in sorted(rules, key=lambda rule: rule[0]))))


def _read_group(groups: Fields, name: str, default: str) -> list[tuple[int, SchemeRule]]:
    """Return the rules of a group, each with its precedence among all rules."""
    path, group = f"config_groups.{name}.", groups.section(name)
    formats = tuple(_FORMATS) if default == _MIXED else (*_FORMATS, None)
    format = require(group, "format", formats, path) or default
    refuse(group, ("output_activations",), path)
    for part in ("weights", "input_activations"):
        found = group.get(part)
        wanted = "an object" if part == "weights" else "an object or null"
        is_scheme = isinstance(found, dict) or (found is None and part != "weights")
        group.require(is_scheme, f"{SECTION}.{path}{part}", found, wanted)
    scheme = _FORMATS[format](group, path)
    targets = names_in(group, f"{SECTION}.{path[:-1]}", "targets")
    group.require(bool(targets), f"{SECTION}.{path}targets", targets, f"names, patterns or {CLASS}")
    key, ranked = f"{SECTION}.{path}targets", groupby(sorted(targets, key=_rank), _rank)
    return [(rank, SchemeRule(by_name_or_pattern([*some], key), (scheme,))) for rank, some in ranked]


def _rank(target: str) -> int:
    return 2 if target == CLASS else 1 if target.startswith("re:") else 0


def _int_quantized(group: Fields, path: str) -> Scheme:
    """Read W8A8 or W4A8."""
    weights, where = group.section("weights"), f"{path}weights."
    bits = require(weights, "num_bits", (8, 4), where)
    _require_static(weights, where, "int", (True,))
    group.require(
        group.get("input_activations") is not None,
        f"{SECTION}.{path}input_activations",
        None,
        "int8 per token: int-quantized weights are not served alone",
    )
    inputs, of_inputs = group.section("input_activations"), f"{path}input_activations."
    for key, value in _INT8_INPUTS.items():
        require(inputs, key, (value,), of_inputs)
    _require_whole(inputs, of_inputs)
    if bits == 4:
        return int4_bytes(_int4_group(weights, where))
    require(weights, "strategy", ("channel",), where)
    _require_whole(weights, where)
    return Int8()


def _pack_quantized(group: Fields, path: str) -> Scheme:
    weights, where = group.section("weights"), f"{path}weights."
    require(weights, "num_bits", (4,), where)
    _require_static(weights, where, "int", (True, False))
    require(group, "input_activations", (None,), path, "pack-quantized weights are served alone")
    return int4(_int4_group(weights, where), zeros=not weights.get("symmetric"))


def _int4_group(weights: Fields, where: str) -> int:
    """Return the inputs of a group, 0 for one scale per output. Act-order is refused when its tensor is read."""
    refuse(weights, ("block_structure",), where)
    if require(weights, "strategy", ("group", "channel"), where) == "channel":
        require(weights, "group_size", (None, -1), where)
        return 0
    size: int = require(weights, "group_size", _GROUPS_OF_INT4, where)
    return size


def _float_quantized(group: Fields, path: str) -> Scheme:
    """Read FP8 per block, output or matrix."""
    weights, where = group.section("weights"), f"{path}weights."
    require(weights, "num_bits", (8,), where)
    _require_static(weights, where, "float", (True, None))
    _require_inputs(group, path, (8,))
    refuse(weights, ("actorder",), where)
    strategy = require(weights, "strategy", ("channel", "tensor", "block"), where)
    if strategy != "block":
        require(weights, "group_size", (None, -1), where)
        return Fp8((1, 0) if strategy == "channel" else (0, 0))
    block = weights.get("block_structure")
    sizes = block.lower().split("x") if isinstance(block, str) else block
    both = isinstance(sizes, list) and len(sizes) == 2 and all(_SIZE.fullmatch(str(size)) for size in sizes)
    fits = both and int(sizes[1]) % FP8_INPUTS == 0
    weights.require(fits, f"{SECTION}.{where}block_structure", block, BLOCK)
    return Fp8((int(sizes[0]), int(sizes[1])))


def _fp4(scheme: RowCodes, strategy: str, group: Fields, path: str) -> Scheme:
    weights, where = group.section("weights"), f"{path}weights."
    require(weights, "num_bits", (4,), where)
    _require_static(weights, where, "float", (True, None))
    require(weights, "strategy", (strategy,), where)
    require(weights, "group_size", (scheme.group,), where)
    refuse(weights, ("actorder", "block_structure"), where)
    _require_inputs(group, path, (4, 8))
    return scheme


def _require_static(weights: Fields, where: str, kind: str, symmetric: tuple[Any, ...]) -> None:
    require(weights, "type", (kind,), where)
    require(weights, "symmetric", symmetric, where)
    require(weights, "dynamic", (False, None), where)


def _require_whole(scheme: Fields, where: str) -> None:
    """Raise ModelError for groups or blocks."""
    require(scheme, "group_size", (None, -1), where)
    refuse(scheme, ("block_structure", "actorder"), where)


def _require_inputs(group: Fields, path: str, bits: tuple[int, ...]) -> None:
    """Raise ModelError unless activations are floats, of `bits` or not quantised."""
    if group.get("input_activations") is not None:
        inputs, where = group.section("input_activations"), f"{path}input_activations."
        require(inputs, "type", ("float",), where)
        require(inputs, "num_bits", bits, where)


_FORMATS: dict[str, Callable[[Fields, str], Scheme]] = {
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "mxfp4-pack-quantized": partial(_fp4, MXFP4, "group"),
    "nvfp4-pack-quantized": partial(_fp4, NVFP4, "tensor_group"),
}
