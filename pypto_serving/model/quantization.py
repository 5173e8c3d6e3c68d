"""Parse the quantization section of a checkpoint's config.json. Torch-free.

Format: https://github.com/vllm-project/compressed-tensors, as llm-compressor writes W8A8: the weight of a linear layer
X is `X.weight`, int8 [n, k], times `X.weight_scale` [n, 1]. Its inputs are quantized to int8 at run time, with a scale
per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pypto_serving.errors import ModelError
from pypto_serving.model.fields import Fields

SECTION = "quantization_config"
SCHEME = (
    "int-quantized int8 weights per channel with int8 activations per token, as `pypto-serving convert` writes them"
)

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_WANTED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "int-quantized"}
_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config")
_ABSENT_IN_GROUP = ("output_activations",)
_ABSENT_IN_SCHEME = ("group_size", "block_structure", "actorder")


@dataclass(frozen=True, slots=True)
class Quantization:
    """W8A8: int8 weights in all linear layers but those of `ignore`, which has names, and patterns behind "re:"."""

    ignore: tuple[str, ...] = ()

    name = "w8a8"

    @classmethod
    def from_json(cls, config: Fields) -> Self | None:
        """Parse config.json; None if weights are not quantised. Raises ModelError for other schemes."""
        if config.get(SECTION) is None:
            return None
        section = config.section(SECTION)
        for key, wanted in _WANTED.items():
            _require(section, key, wanted, key)
        _require(section, "quantization_status", "compressed", "quantization_status", optional=True)
        _refuse(section, _ABSENT, "")
        _check_group(section)
        ignore = section.get("ignore") or []
        is_list = isinstance(ignore, list) and all(isinstance(name, str) for name in ignore)
        config.require(is_list, f"{SECTION}.ignore", ignore, "a list of names")
        return cls(tuple(_valid(name) for name in ignore))

    @classmethod
    def to_json(cls, ignore: list[str]) -> dict[str, Any]:
        """Write the section of config.json for all linear layers but those of `ignore`."""
        group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS, "output_activations": None}
        return {
            **_WANTED,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }

    def covers(self, module: str) -> bool:
        """Return True if the linear layer called `module` has int8 weights."""
        return not any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry in (module, "Linear")
            for entry in self.ignore
        )


def scale_name(weight: str) -> str:
    """Name the tensor with the scales of the tensor `weight`."""
    return f"{weight}_scale"


def _check_group(section: Fields) -> None:
    groups = section.get("config_groups")
    one = isinstance(groups, Mapping) and len(groups) == 1 and all(isinstance(g, Mapping) for g in groups.values())
    section.require(one, f"{SECTION}.config_groups", groups, f"one group: {SCHEME}")
    ((name, values),) = groups.items()
    path = f"config_groups.{name}."
    group = section.section("config_groups").section(name)
    _require(group, "targets", ["Linear"], f"{path}targets")
    _require(group, "format", _WANTED["format"], f"{path}format", optional=True)
    _refuse(group, _ABSENT_IN_GROUP, path)
    for part, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        section.require(values.get(part) is not None, f"{SECTION}.{path}{part}", None, SCHEME)
        scheme = group.section(part)
        for key, value in wanted.items():
            _require(scheme, key, value, f"{path}{part}.{key}")
        _refuse(scheme, _ABSENT_IN_SCHEME, f"{path}{part}.")


def _require(fields: Fields, key: str, wanted: object, path: str, optional: bool = False) -> None:
    found = fields.get(key)
    if found is None and optional:
        return
    same = found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
    fields.require(same, f"{SECTION}.{path}", found, f"{_shown(wanted)}: what is served is {SCHEME}")


def _refuse(fields: Fields, keys: tuple[str, ...], path: str) -> None:
    for key in keys:
        found = fields.get(key)
        dense = key == "sparsity_config" and isinstance(found, Mapping) and found.get("format") == "dense"
        fields.require(not found or dense, f"{SECTION}.{path}{key}", found, f"absent: what is served is {SCHEME}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _valid(entry: str) -> str:
    try:
        re.compile(entry.removeprefix("re:"))
    except re.error as error:
        raise ModelError(f"{SECTION}.ignore has {entry!r}, which is no pattern: {error}") from None
    return entry
