"""How all matrices of a checkpoint are stored: rules by module. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.modules import Modules
from pypto_serving.model.formats.patterns import require_quick
from pypto_serving.model.formats.schemes import PLAIN, Scheme
from pypto_serving.util import one_of

SECTION = "quantization_config"
_WAY_OUT = "give the checkpoint that it was made from, or `convert` that"


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """Stores `modules` as one of `schemes`; the files decide which."""

    modules: Modules
    schemes: tuple[Scheme, ...]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Rules for linear layers: the first that has a module counts; layers without a rule are not quantised.

    Raises ModelError for patterns that could take long to match.
    """

    rules: tuple[SchemeRule, ...]

    def __post_init__(self) -> None:
        require_quick(SECTION, (pattern for rule in self.rules for pattern in rule.modules.patterns))

    def schemes(self, module: str) -> tuple[Scheme, ...]:
        """Return the ways in which a module may be stored, the likeliest first."""
        found = next((rule.schemes for rule in self.rules if module in rule.modules), ())
        return (*found, PLAIN)


def require(fields: Fields, key: str, wanted: tuple[Any, ...], path: str = "", why: str = "") -> Any:
    """Return the value of `key`. Raises ModelError naming it unless it is one of `wanted`, or absent and None is."""
    found = fields.get(key)
    same = any(type(found) is type(value) and found == value for value in wanted)
    shown = one_of(["absent" if value is None else _shown(value) for value in wanted])
    fields.require(same, f"{SECTION}.{path}{key}", found, f"{shown}{why and f': {why}'}; {_WAY_OUT}")
    return found


def refuse(fields: Fields, keys: tuple[str, ...], path: str = "") -> None:
    """Raise ModelError naming one of `keys` that is there and not empty."""
    for key in keys:
        found = fields.get(key)
        fields.require(not found, f"{SECTION}.{path}{key}", found, f"absent: it is not supported; {_WAY_OUT}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
