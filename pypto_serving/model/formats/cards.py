"""Which stored matrices the kernels for NVIDIA cards multiply by, and the bytes that these take there. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from pypto_serving.model.formats.gptq_awq import ColumnCodes
from pypto_serving.model.formats.schemes import PLAIN, Fp8, Int8, Plain, RowCodes, Scheme
from pypto_serving.model.inventory import Inventory
from pypto_serving.types.weights import Table
from pypto_serving.util import ceil_div

SPAN = 128
"""Inputs that share a scale in 4 bits and FP8, and outputs in FP8."""
_CODE_OUTPUTS = 64
"""Outputs of an instruction, in whose order 4-bit codes are packed."""


class CardForm(enum.Enum):
    """How a card holds a matrix [n, k]."""

    BF16 = enum.auto()
    INT8 = enum.auto()
    """A scale an output. Rows are rounded to int8, too."""
    FP8 = enum.auto()
    """A scale for 128 outputs and inputs. Rows are rounded to FP8, too."""
    INT4 = enum.auto()
    """A scale for 128 inputs of an output, and no zero points. Rows stay bfloat16."""


def card_form(scheme: Scheme) -> CardForm | None:
    """Return the form that has the values of a scheme exactly, or None."""
    match scheme:
        case Plain():
            return CardForm.BF16
        case Int8():
            return CardForm.INT8
        case Fp8(block=(rows, columns)) if rows % SPAN == columns % SPAN == 0:
            return CardForm.FP8
        case RowCodes(table=Table.INT4, zeros=False) | ColumnCodes(zeros=False) if scheme.group % SPAN == 0:
            return CardForm.INT4
    return None


def card_bytes(inventory: Inventory) -> int:
    """Count the bytes of all weights as a card holds them. Those that it cannot hold count as bfloat16."""
    total = 0
    for name, tensor in inventory.model.items():
        match card_form(inventory.scheme(name)), tensor.shape:
            case CardForm.INT8, (n, k):
                total += n * k + 4 * n
            case CardForm.FP8, (n, k):
                total += n * k + 4 * ceil_div(n, SPAN) * ceil_div(k, SPAN)
            case CardForm.INT4, (n, k):
                total += n * k // 2 + 4 * n * ceil_div(k, SPAN)
            case _:
                total += 2 * tensor.count
    return total


def card_obstacle(inventory: Inventory, joined: Iterable[Sequence[str]]) -> str:
    """Say which matrix the kernels cannot multiply by, or nothing if they take all.

    joined: modules whose matrices become one along their outputs.
    """
    sizes = inventory.sizes()
    for module, scheme in inventory.schemes.items():
        form, (n, k) = card_form(scheme), sizes[module]
        if form is None:
            served = f"w8a8, fp8 {SPAN}x{SPAN}, and int4 in groups of {SPAN} inputs without zero points"
            return f"of quantised weights its kernels take {served}, not {scheme.name}"
        if form == CardForm.INT4 and (n % _CODE_OUTPUTS or k % SPAN):
            needed = f"outputs in multiples of {_CODE_OUTPUTS} and inputs in multiples of {SPAN}"
            return f"its kernels need 4-bit weights with {needed}, and {module} is [{n}, {k}]"
    for modules in joined:
        forms = {card_form(inventory.schemes.get(module, PLAIN)) for module in modules}
        if len(forms) > 1:
            return f"its kernels need {' and '.join(modules)} to be stored alike"
        odd = next((module for module in modules[:-1] if sizes[module][0] % SPAN), None)
        if forms == {CardForm.FP8} and odd:
            return f"its kernels need FP8 weights of multiples of {SPAN} outputs, not the {sizes[odd][0]} of {odd}"
    return ""
