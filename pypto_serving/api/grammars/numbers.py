"""Keep the numbers of a schema to those that llguidance reads exactly."""

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
"""Different values of `multipleOf` in a schema."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
Parts = Sequence[tuple[str, dict[str, Any]]]
"""The schemas in a schema, with their places."""


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


def unjoined_multiple(parts: Parts) -> tuple[str, float] | None:
    """Return the place and value of a `multipleOf` that cannot be joined with another one, or that is one too many.

    Two that hold for one number are joined in words of 32 bits.
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
    """Move excluded bounds that llguidance would allow, and write those of draft 4 like others.

    Where a whole number is excluded and the other bound is in the same unit, as in above 0 and up to 0.5, llguidance
    allows the whole number. Bounds may come together from several places, so an excluded one becomes a bound just
    beside it if any bound of the schema is in that unit.
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
