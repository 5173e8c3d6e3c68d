"""How the matrix of a linear layer may be stored: the interface, and weights that are not quantised. Torch-free.

A matrix [n, k] has n outputs and k inputs. Its module is called `module`, and its tensors `module.something`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pypto_serving.errors import ModelError
from pypto_serving.kernels import BF16, PANEL
from pypto_serving.model.checkpoint import Expected, StoredTensor
from pypto_serving.model.formats.matrix_tensors import MatrixTensors
from pypto_serving.types.weights import StoredCodes, StoredFp8
from pypto_serving.util import ceil_div


class Scheme(Protocol):
    """How one matrix is stored."""

    @property
    def name(self) -> str:
        """Name the scheme for people, in a few words; empty for weights that are not quantised."""

    @property
    def extras(self) -> tuple[str, ...]:
        """List by last component tensors that files may hold besides, whose values serving does not need."""

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        """List the tensors of a matrix by name. Raises ModelError for sizes that the scheme cannot have."""

    @property
    def scale(self) -> str:
        """Name the tensor of scales by its last component; empty if there is none."""

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        """Count the bytes of a matrix as kernels hold it, n in half panels.

        `scales` is the stored dtype of its scales, by default the usual one.
        """


class Coded(Scheme, Protocol):
    """A scheme of codes of 4 bits or FP8."""

    def read(self, tensors: MatrixTensors, n: int, k: int) -> StoredCodes | StoredFp8:
        """View a matrix in its mapped files. Raises ModelError for scales that are no numbers."""


@dataclass(frozen=True, slots=True)
class Plain:
    """bfloat16, float16 or float32, which kernels read in bfloat16."""

    name: str = ""
    extras: tuple[str, ...] = ()
    scale: str = ""

    def expected(self, module: str, n: int, k: int) -> dict[str, Expected]:
        return {f"{module}.weight": Expected((n, k))}

    def packed_bytes(self, n: int, k: int, scales: str = "") -> int:
        return BF16.planned_bytes(n, k)


PLAIN = Plain()


def held(schemes: Sequence[Scheme], headers: Mapping[str, StoredTensor], module: str, n: int, k: int) -> Scheme:
    """Return the first of `schemes` whose tensors are all in `headers`, or the first of all if none is.

    Quantisers leave matrices in floats whose sizes their scheme cannot have.
    """

    def holds(scheme: Scheme) -> bool:
        try:
            expected = scheme.expected(module, n, k).items()
        except ModelError:
            return False
        return all(name in headers and headers[name].dtype in wanted.dtypes for name, wanted in expected)

    return next(filter(holds, schemes), schemes[0])


def packed_bytes(
    scheme: Scheme, headers: Mapping[str, StoredTensor], module: str, n: int, k: int, unit: int = PANEL
) -> int:
    """Count the bytes of a matrix as kernels hold it, outputs in multiples of `unit`.

    `headers`, if any, have the dtype of its scales.
    """
    scales = headers.get(f"{module}.{scheme.scale}")
    return scheme.packed_bytes(ceil_div(n, unit) * unit, k, "" if scales is None else scales.dtype)


def groups_in(module: str, k: int, group: int, scheme: str) -> int:
    """Count the groups of `group` inputs, 0 for all in one. Raises ModelError unless they fill the `k` inputs."""
    if group and k % group:
        raise ModelError(f"{module} has {k} inputs, which groups of {group} do not fill: {scheme} cannot store that")
    return k // group if group else 1
