"""Keep the numbers of a schema to those that llguidance reads exactly."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

_EXACT = 2**53
_WORD = 2**32
MAX_DIGITS = 15
MAX_MULTIPLES = 64
"""Different values of `multipleOf` in a schema."""


def is_exact(value: float) -> bool:
    """Whether a number is read exactly: whole ones, and fractions that are one division of two of them."""
    if not abs(value) < _EXACT:
        return False
    mantissa, _, exponent = repr(value).partition("e")
    digits = mantissa.replace(".", "").strip("-0")
    return isinstance(value, int) or (len(digits) <= MAX_DIGITS and len(digits) - int(exponent or 0) <= 22)


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def inward(name: str, value: Any) -> Any:
    """Return the nearest bound within the one called `name` that is short enough to be read exactly."""
    if not is_number(value):
        return value
    is_lower = name in ("minimum", "exclusiveMinimum")
    if value < 1 - _EXACT if is_lower else value > _EXACT - 1:
        return 1 - _EXACT if is_lower else _EXACT - 1
    if isinstance(value, int) or not math.isfinite(value):
        return value
    rounding = decimal.ROUND_CEILING if is_lower else decimal.ROUND_FLOOR
    return float(decimal.Context(prec=MAX_DIGITS, rounding=rounding).create_decimal(repr(value)))


class Multiples:
    """The values of `multipleOf` in a schema. Two that hold for one number are joined in words of 32 bits."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def add(self, value: float) -> bool:
        """Return whether any two values can be joined."""
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        coefficient, places = int("".join(map(str, digits))), -int(exponent)
        if places < 0:
            coefficient, places = coefficient * 10**-places, 0
        new = (coefficient, places)
        joined = all(_product(new, each) < _WORD for each in self._seen - {new})
        self._seen.add(new)
        return joined and len(self._seen) <= MAX_MULTIPLES


def _product(one: tuple[int, int], other: tuple[int, int]) -> int:
    places = max(one[1], other[1])
    return int(one[0] * 10 ** (places - one[1])) * int(other[0] * 10 ** (places - other[1]))


class Bounds:
    """The bounds of numbers in a schema.

    Where a whole number is excluded and the other bound is in the same unit, as in above 0 and up to 0.5, llguidance
    allows the whole number. Bounds may come together from several places, so an excluded one becomes a bound just
    beside it if any bound of the schema is in that unit.
    """

    def __init__(self) -> None:
        self._units: set[int] = set()
        self._excluding: list[dict[str, Any]] = []

    def add(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Look at what a schema says of numbers; return it."""
        for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive not in schema:
                continue
            if schema[exclusive] is True and name in schema:  # as in draft 4
                schema[exclusive] = schema.pop(name)
            elif isinstance(schema[exclusive], bool):
                del schema[exclusive]
        bounds = [schema[name] for name in BOUNDS if name in schema]
        self._units |= {math.floor(bound) for bound in bounds if isinstance(bound, float) and not bound.is_integer()}
        if any(name in schema for name in _BESIDE):
            self._excluding.append(schema)
        return schema

    def settle(self) -> None:
        """Move the bounds that would be allowed. Call it when all are known."""
        for schema in self._excluding:
            for exclusive, (name, unit, sign) in _BESIDE.items():
                bound = schema.get(exclusive)
                if not isinstance(bound, int | float) or bound != int(bound) or int(bound) + unit not in self._units:
                    continue
                del schema[exclusive]
                beside = bound + sign * 10.0 ** -max(0, min(9, 15 - len(str(abs(int(bound))))))
                schema[name] = max(schema.get(name, beside) * sign, beside * sign) * sign


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BESIDE = {"exclusiveMinimum": ("minimum", 0, 1), "exclusiveMaximum": ("maximum", -1, -1)}
"""The bound that can stand for an excluded one, where its unit begins, and to which side it moves."""
