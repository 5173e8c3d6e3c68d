"""The mapped tensors of one matrix. Torch-free."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.model.formats.bits import are_finite, as_float32
from pypto_serving.model.tensors import StoredTensors
from pypto_serving.types.arrays import Array, Float32Array

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

    def require_order(self, name: str, group: int) -> None:
        """Raise ModelError if the inputs of groups are not neighbours, as the tensor `name`, if any, tells."""
        if not self.has(name):
            return
        groups = self.view(name)
        odd = np.flatnonzero(groups != np.arange(math.prod(groups.shape)) // group)
        if len(odd):
            at = int(odd[0])
            self.refuse(
                name, f"puts input {at} into group {groups[at]}, not {at // group}: act-order (desc_act) is not served"
            )

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raise ModelError about a tensor."""
        raise ModelError(f"{self._tensors[f'{self._module}.{name}'].file}: tensor {self._module}.{name} {what}")
