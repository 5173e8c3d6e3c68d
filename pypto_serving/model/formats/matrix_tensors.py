"""The mapped tensors of one matrix. Torch-free."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import FLOATS
from pypto_serving.model.formats.bits import are_finite, as_float32
from pypto_serving.model.tensors import StoredTensors
from pypto_serving.types.arrays import Array, Float32Array
from pypto_serving.util import one_of

E8M0_DTYPES = ("U8", "F8_E8M0")


class MatrixTensors:
    """Views the tensors of `module` by last component, and refuses scales that are no numbers."""

    def __init__(self, tensors: StoredTensors, module: str) -> None:
        self._tensors, self._module = tensors, module

    def has(self, name: str) -> bool:
        """Return True if the module has a tensor called `name`."""
        return self._tensors.has(f"{self._module}.{name}")

    def is_surplus(self, name: str) -> bool:
        """Return True if the module has a tensor called `name` that the model does not need."""
        return self._tensors.is_surplus(f"{self._module}.{name}")

    def dtype(self, name: str) -> str:
        """Return the stored dtype."""
        return self._tensors[f"{self._module}.{name}"].dtype

    def view(self, name: str) -> Array:
        """View a tensor in its map; bfloat16 and 8-bit floats as unsigned integers."""
        return self._tensors.view(self._tensors[f"{self._module}.{name}"])

    def scales(self, name: str) -> Array:
        """View a tensor of scales as stored."""
        stored, dtype = self.view(name), self.dtype(name)
        if not are_finite(stored, dtype):
            self.refuse(name, "has scales that are not finite")
        return stored

    def float32(self, name: str) -> Float32Array:
        """Read a tensor of scales in float32."""
        return as_float32(self.scales(name), self.dtype(name))

    def require_order(self, name: str, k: int, group: int, unset: int | None = None) -> None:
        """Raise ModelError if the inputs of groups are not neighbours, by the tensor `name` [k], if any.

        One that is `unset` everywhere says nothing.
        """
        if not self.has(name):
            return
        self._require(name, (k,), ("I32", "I64"))
        groups = self.view(name)
        if unset is not None and (groups == unset).all():
            return
        odd = np.flatnonzero(groups != np.arange(k) // group)
        if len(odd):
            at = int(odd[0])
            self.refuse(
                name, f"puts input {at} into group {groups[at]}, not {at // group}: act-order (desc_act) is not served"
            )

    def require_zeros(self, name: str, n: int) -> None:
        """Raise ModelError if the model does not need the tensor `name` [n], and it has other numbers than zeros."""
        if self.is_surplus(name):
            self._require(name, (n,), FLOATS)
            if self.float32(name).any():
                self.refuse(name, "is not zero, but config.json gives the model none")

    def _require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """Raise ModelError unless a tensor that files may hold besides is of `shape` and one of `dtypes`."""
        found = self._tensors[f"{self._module}.{name}"]
        if found.shape != shape or found.dtype not in dtypes:
            wanted = f"shape {list(shape)} and dtype {one_of(dtypes)}"
            self.refuse(name, f"has shape {list(found.shape)} and dtype {found.dtype}, but must have {wanted}")

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise ModelError about a tensor."""
        raise ModelError(f"{self._tensors[f'{self._module}.{name}'].file}: tensor {self._module}.{name} {what}")
