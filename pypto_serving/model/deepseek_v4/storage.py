"""How DeepSeek V4 checkpoints store their tensors: plain, or quantised as released. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from pypto_serving.model.contents import STORED_DTYPES, Shape, Stored
from pypto_serving.model.fields import Fields
from pypto_serving.model.quantization import SECTION
from pypto_serving.util import ceil_div

Role = Literal["plain", "precise", "float", "ids", "latent", "linear", "expert"]
"""What a tensor is.

`plain` and `precise` ones are of the checkpoint's dtype, bfloat16 in releases, and the latter are used in float32;
`float` ones are float32 everywhere, `ids` int64. The others are matrices: a latent's, one of the large ones, an
expert's.
"""
Form = Literal["fp8", "fp4", "int8"]

_PLAIN: dict[Role, str] = {"float": "F32", "ids": "I64"}
_FP8_BLOCK, _FP4_BLOCK = 128, 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the model: its logical shape and what it is."""

    shape: Shape
    role: Role = "plain"

    @property
    def count(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Storage:
    """The form of quantised matrices by role; roles that are not named are plain. `name` is for people.

    fp8: e4m3 with an e8m0 scale for every 128 x 128 block. fp4: two e2m1 in a byte, the even column in the low
    half, and an e8m0 scale for every 32 columns. int8: symmetric, and a float32 scale for every output.
    """

    name: str = ""
    forms: tuple[tuple[Role, Form], ...] = ()

    @classmethod
    def from_json(cls, config: Fields) -> Self:
        """Read `quantization_config` and `expert_dtype`; raises ModelError for what no release has."""
        section = config.section(SECTION)
        method = section.get("quant_method")
        if config.get(SECTION) is None:
            return cls()
        known = ("fp8", "compressed-tensors")
        section.require(method in known, f"{SECTION}.quant_method", method, " or ".join(known))
        if method == "compressed-tensors":
            return cls("int8", (("linear", "int8"), ("expert", "int8")))
        block = section.get("weight_block_size")
        section.require(block == [_FP8_BLOCK] * 2, f"{SECTION}.weight_block_size", block, "[128, 128]")
        given = config.get("expert_dtype") or section.get("expert_dtype") or "fp8"
        config.require(given in ("fp4", "fp8"), "expert_dtype", given, "fp4 or fp8")
        expert: Form = "fp4" if given == "fp4" else "fp8"
        name = "fp8" if expert == "fp8" else "fp8 with fp4 experts"
        return cls(name, (("latent", "fp8"), ("linear", "fp8"), ("expert", expert)))

    def stored(self, name: str, tensor: Tensor, dtype: str) -> dict[str, Stored]:
        """List what a file holds for a tensor: itself in `dtype`, or its quantised form with scales."""
        form = dict(self.forms).get(tensor.role)
        if form is None:
            return {name: Stored(_PLAIN.get(tensor.role, STORED_DTYPES[dtype]), tensor.shape)}
        rows, columns = tensor.shape
        scale = f"{name.removesuffix('.weight')}.scale"
        if form == "fp8":
            blocks = (ceil_div(rows, _FP8_BLOCK), ceil_div(columns, _FP8_BLOCK))
            return {name: Stored("F8_E4M3", tensor.shape), scale: Stored("F8_E8M0", blocks)}
        if form == "fp4":
            scales = Stored("F8_E8M0", (rows, ceil_div(columns, _FP4_BLOCK)))
            return {name: Stored("I8", (rows, ceil_div(columns, 2))), scale: scales}
        return {name: Stored("I8", tensor.shape), scale: Stored("F32", (rows,))}
