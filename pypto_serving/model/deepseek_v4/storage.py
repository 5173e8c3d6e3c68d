"""How DeepSeek V4 checkpoints store their tensors: plain, or quantised as released. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

from pypto_serving.model.checkpoint import FLOATS, INT64, Expected
from pypto_serving.model.contents import Shape
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats import compressed_tensors
from pypto_serving.model.formats.eight_bits import E8M0, Fp8, Int8
from pypto_serving.model.formats.four_bits import DEEPSEEK_FP4
from pypto_serving.model.formats.quantization import SECTION, require
from pypto_serving.model.formats.schemes import PLAIN, Scheme

Role = Literal["plain", "precise", "float", "ids", "latent", "linear", "expert"]
"""What a tensor is.

`plain` and `precise` ones are of the checkpoint's dtype, bfloat16 in releases, and the latter are used in float32;
`float` ones are float32 everywhere, `ids` int64. The others are matrices: a latent's, one of the large ones, an
expert's.
"""

MATRICES: tuple[Role, ...] = ("latent", "linear", "expert")
_BLOCK = (128, 128)


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
    """The schemes that matrices of a role may have, the likeliest first; roles not named are plain.

    `name` is for people. Scales are called `scale`.
    """

    name: str = ""
    schemes: tuple[tuple[Role, tuple[Scheme, ...]], ...] = ()

    @classmethod
    def from_json(cls, config: Fields) -> Self:
        """Read `quantization_config` and `expert_dtype`; raises ModelError for what no release has."""
        if config.get(SECTION) is None:
            return cls()
        section = config.section(SECTION)
        if require(section, "quant_method", ("fp8", "compressed-tensors")) == "compressed-tensors":
            return cls._int8(section)
        require(section, "weight_block_size", (list(_BLOCK),))
        given = config.get("expert_dtype") or section.get("expert_dtype")
        config.require(given in ("fp4", "fp8", None), "expert_dtype", given, "fp4 or fp8")
        # Base releases, which say fp8, have float32 scales; repackaged ones, which say nothing, have e8m0.
        usual = "F32" if given == "fp8" else E8M0
        fp8 = Fp8(_BLOCK, "scale", (E8M0, *FLOATS), usual)
        experts: tuple[Scheme, ...] = (DEEPSEEK_FP4, fp8) if given == "fp4" else (fp8, DEEPSEEK_FP4)
        name = "fp8 with fp4 experts" if given == "fp4" else "fp8"
        return cls(name, (("latent", (fp8,)), ("linear", (fp8,)), ("expert", experts)))

    @classmethod
    def _int8(cls, section: Fields) -> Self:
        """Read W8A8: large matrices and experts are int8, and their scales have DeepSeek's name."""
        for rule in compressed_tensors.read(section).rules:
            for scheme in rule.schemes:
                served = scheme == PLAIN or isinstance(scheme, Int8)
                section.require(served, f"{SECTION}.config_groups", scheme.name, "int8 per channel")
        int8 = (Int8("scale"),)
        return cls("int8", (("linear", int8), ("expert", int8)))

    def schemes_of(self, role: Role) -> tuple[Scheme, ...]:
        """Return the ways in which tensors of a role may be stored, the likeliest first."""
        return (*dict(self.schemes).get(role, ()), PLAIN)


def expected_plain(tensor: Tensor) -> Expected:
    """Return the expected form of a tensor that is no matrix."""
    if tensor.role == "ids":
        return Expected(tensor.shape, (INT64,))
    return Expected(tensor.shape, usual="F32" if tensor.role == "float" else "")
