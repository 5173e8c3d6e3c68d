"""Adapt the numbers of a schema to what llguidance reads exactly."""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_EXACT = 2**53
_WORD = 2**32
MAX_DIGITS = 15
MAX_MULTIPLES = 64
"""Limit of different values of `multipleOf` in a schema."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Parts = Sequence[tuple[str, dict[str, Any]]]
"""The subschemas of a schema, each after its place."""


def is_exact(value: float) -> bool:
    """Return whether llguidance reads a number exactly: integers, and fractions that divide one integer by another."""
    if not abs(value) < _EXACT:
        return False
    mantissa, _, exponent = repr(value).partition("e")
    digits = mantissa.replace(".", "").strip("-0")
    return isinstance(value, int) or (len(digits) <= MAX_DIGITS and len(digits) - int(exponent or 0) <= 22)


def is_number(value: Any) -> bool:
    """Return whether a value is a JSON number, which excludes booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def inward(name: str, value: Any) -> Any:
    """Return the nearest value within the bound `name` that has few enough digits to be read exactly."""
    if not is_number(value):
        return value
    is_lower = name in ("minimum", "exclusiveMinimum")
    if value < 1 - _EXACT if is_lower else value > _EXACT - 1:
        return 1 - _EXACT if is_lower else _EXACT - 1
    if isinstance(value, int) or not math.isfinite(value):
        return value
    rounding = decimal.ROUND_CEILING if is_lower else decimal.ROUND_FLOOR
    return float(decimal.Context(prec=MAX_DIGITS, rounding=rounding).create_decimal(repr(value)))


def unjoined_multiple(parts: Parts) -> tuple[str, float] | None:
    """Return place and value of a `multipleOf` beyond the limits, or None.

    It cannot be combined with another one in 32 bits, as llguidance does, or exceeds MAX_MULTIPLES.
    """
    seen: set[Decimal] = set()
    for place, part in parts:
        if "multipleOf" not in part:
            continue
        new = Decimal(repr(part["multipleOf"]))
        if any(_product(new, each) >= _WORD for each in seen - {new}) or len(seen | {new}) > MAX_MULTIPLES:
            return place, part["multipleOf"]
        seen.add(new)
    return None


def _product(one: Decimal, other: Decimal) -> Decimal:
    scale = Decimal(10) ** -min(0, *(int(each.normalize().as_tuple().exponent) for each in (one, other)))
    return (one * scale) * (other * scale)


def settle_bounds(parts: Parts) -> None:
    """Replace exclusive bounds that llguidance would not enforce, and rewrite draft 4's bounds in the new form.

    If an exclusive bound is an integer and the other bound is less than 1 away, as in above 0 and up to 0.5, llguidance
    allows the integer. Bounds of several places may apply together, so an exclusive integer bound is replaced by an
    inclusive one just beside it if any bound of the schema is that near.
    """
    bounds = [part[name] for _, part in parts for name in BOUNDS if name in part]
    units = {math.floor(bound) for bound in bounds if isinstance(bound, float) and not bound.is_integer()}
    for _, part in parts:
        for exclusive, name, unit, sign in (
            ("exclusiveMinimum", "minimum", 0, 1),
            ("exclusiveMaximum", "maximum", -1, -1),
        ):
            bound = part.pop(exclusive, False)
            if bound is True:
                bound = part.pop(name, False)
            if bound is False:
                continue
            if bound != int(bound) or int(bound) + unit not in units:
                part[exclusive] = bound
                continue
            beside = bound + sign * 10.0 ** -max(0, min(9, 15 - len(str(abs(int(bound))))))
            part[name] = max(part.get(name, beside) * sign, beside * sign) * sign
