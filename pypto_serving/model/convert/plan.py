"""What a conversion makes of every weight of a checkpoint. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import Expected
from pypto_serving.model.convert.encodings import Encoding
from pypto_serving.model.formats.eight_bits import Fp8
from pypto_serving.model.formats.four_bits import RowCodes
from pypto_serving.model.formats.schemes import PLAIN, Scheme
from pypto_serving.types.weights import Table


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the target, made of the tensor `source`: a matrix in `encoding`, or in `dtype`; "" is as stored.

    shape, scheme: of the source, whose matrices are called `module.weight`.
    """

    source: str
    shape: tuple[int, ...]
    scheme: Scheme = PLAIN
    encoding: Encoding | None = None
    dtype: str = ""

    def tensors(self) -> list[str]:
        """List the tensors that the weight is stored in."""
        if self.scheme == PLAIN:
            return [self.source]
        n, k = self.shape
        return list(self.scheme.expected(self.source.removesuffix(".weight"), n, k))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The weights of the target by name.

    expected, ignores: what the source must hold, and may.
    config: values of config.json that change; None removes a key.
    """

    weights: Mapping[str, Weight]
    expected: Mapping[str, Expected]
    ignores: Callable[[str], bool]
    config: Mapping[str, Any]

    def check(self) -> None:
        """Raise ModelError for weights that were rounded too far already, or that an encoding does not hold."""
        for name, weight in self.weights.items():
            if weight.encoding is not None:
                _require_fine(weight.scheme)
                n, k = weight.shape
                weight.encoding.scheme.expected(name.removesuffix(".weight"), n, k)


def _require_fine(scheme: Scheme) -> None:
    is_fp4 = isinstance(scheme, RowCodes) and scheme.table == Table.E2M1
    if not (scheme == PLAIN or is_fp4 or isinstance(scheme, Fp8)):
        raise ModelError(
            f"its weights are quantised already ({scheme.name}); give the checkpoint that it was made from"
        )
