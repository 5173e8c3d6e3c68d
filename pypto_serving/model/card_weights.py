"""Load the matrices of a checkpoint for the kernels of NVIDIA cards, however they are stored."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from pypto_serving.errors import ModelError
from pypto_serving.kernels.cuda.int4 import Int4Matrix, pack_int4
from pypto_serving.kernels.cuda.products import Bf16Matrix, GatedMatrix, SplitMatrix
from pypto_serving.kernels.cuda.quantized import Fp8Matrix, GatedSums, Int8Matrix, RoundedRows
from pypto_serving.model.formats.cards import SPAN, CardForm, card_form
from pypto_serving.model.formats.schemes import PLAIN, Coded
from pypto_serving.model.formats.values import AWQ_ORDER, MatrixTensors, as_float32
from pypto_serving.model.inventory import Inventory
from pypto_serving.model.loader import TorchWeights
from pypto_serving.types.arrays import Array
from pypto_serving.types.weights import Layout, StoredCodes, StoredFp8
from pypto_serving.util import ceil_div

_OLDEST_FP8 = (8, 9)
"""The oldest compute capability with products of FP8."""
_NAN = 0x7F
"""In E4M3, with or without the sign."""
_EIGHT_BITS = {CardForm.INT8, CardForm.FP8}


class CardWeights(TorchWeights):
    """Loads matrices as `card_form` says; weights must be such that `card_obstacle` finds none.

    All matrices of 8 bits share the room for rounded rows.
    """

    def expect(self, inventory: Inventory, num_rows: int) -> None:
        """Check all tensors before any is read, and allocate room for `num_rows` rounded rows. Raises ModelError."""
        self.require(inventory.expected(), inventory.ignores)
        self._schemes, self._sizes = inventory.schemes, inventory.sizes()
        inputs = [self._sizes[name][1] for name, scheme in self._schemes.items() if card_form(scheme) in _EIGHT_BITS]
        self._rounded = RoundedRows(num_rows, max(inputs, default=0), torch.empty(0).device)

    def matrix(self, *modules: str) -> SplitMatrix:
        """Load the matrices [n_i, k] of modules that are stored alike, joined along outputs. Raises ModelError."""
        names = [f"{module}.weight" for module in modules]
        match self._form(modules[0]):
            case CardForm.INT8:
                scales = [self._tensors_of(module).float32(self._schemes[module].scale).ravel() for module in modules]
                return Int8Matrix(self.read(*names, dtype=torch.int8), _joined(scales), self._rounded)
            case CardForm.FP8:
                if self._rounded.codes.is_cuda and torch.cuda.get_device_capability() < _OLDEST_FP8:
                    raise ModelError("FP8 weights need a card of compute capability 8.9 or newer")
                scales = [_block_scales(cast("StoredFp8", self._coded(module))) for module in modules]
                weights = self.read(*names, dtype=torch.float8_e4m3fn)
                if not weights.is_meta and (weights.view(torch.uint8) & _NAN == _NAN).any():
                    raise ModelError(f"a weight of {' or '.join(modules)} is not a number")
                return Fp8Matrix(weights, _joined(scales), self._rounded)
            case CardForm.INT4:
                stored = [cast("StoredCodes", self._coded(module)) for module in modules]
                words, scales = self._packed(modules, stored), [_group_scales(each) for each in stored]
                return Int4Matrix(words, _joined(scales))
        return Bf16Matrix(self.read(*names))

    def gated(self, *modules: str) -> GatedMatrix | GatedSums:
        """Load gate and up, stored alike or as one matrix. Raises ModelError."""
        if self._form(modules[0]) == CardForm.BF16:
            return GatedMatrix(self.read(*(f"{module}.weight" for module in modules)))
        return GatedSums(self.matrix(*modules))

    def _form(self, module: str) -> CardForm | None:
        return card_form(self._schemes.get(module, PLAIN))

    def _tensors_of(self, module: str) -> MatrixTensors:
        return MatrixTensors(self._tensors, module)

    def _coded(self, module: str) -> StoredCodes | StoredFp8:
        """View a matrix of 4 bits or FP8 in its mapped files."""
        return cast("Coded", self._schemes[module]).read(self._tensors_of(module), *self._sizes[module])

    def _packed(self, modules: tuple[str, ...], stored: list[StoredCodes]) -> Tensor:
        """Unpack codes of 4 bits on the device, one matrix after the other, and pack them for its instructions."""
        words = []
        for module, each in zip(modules, stored, strict=True):
            if each.layout == Layout.BYTES and (each.codes.min() < -8 or each.codes.max() > 7):
                self._tensors_of(module).refuse("weight", "has codes outside of [-8, 7]")
            words.append(pack_int4(_integers(_on_device(each.codes), each.layout)))
            for name in self._schemes[module].expected(module, *self._sizes[module]):
                self._tensors.forget(self._tensors[name])
        return torch.cat(words)


def _integers(codes: Tensor, layout: Layout) -> Tensor:
    """Return what stored codes without zero points stand for: integers from -8 to 7, [n, k]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    match layout:
        case Layout.BYTES:
            return codes
        case Layout.ROWS:
            found = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        case Layout.GPTQ:
            found = (codes[:, None] >> shifts[:, None] & 15).flatten(0, 1).T
        case Layout.AWQ:
            found = (codes[..., None] >> shifts[np.argsort(AWQ_ORDER).tolist()] & 15).flatten(1).T
    return found.to(torch.int8) - 8


def _group_scales(stored: StoredCodes) -> Array:
    """Return scales of 128 inputs each, float32 [n, k / 128]."""
    scales = as_float32(stored.scales, stored.form.scale_dtype) * np.float32(stored.factor)
    return scales.repeat(stored.form.group // SPAN, axis=1)


def _block_scales(stored: StoredFp8) -> Array:
    """Return scales of 128 x 128 weights each, float32 [n / 128, k / 128], rounded up."""
    (n, k), (height, width) = stored.weights.shape, stored.form.block
    rows, columns = (np.arange(ceil_div(size, SPAN)) * SPAN // step for size, step in ((n, height), (k, width)))
    return stored.scales[rows][:, columns]


def _joined(arrays: list[Array]) -> Tensor:
    return _on_device(np.concatenate(arrays))


def _on_device(array: Array) -> Tensor:
    """Copy an array to torch's default device."""
    source = torch.from_numpy(np.ascontiguousarray(array))
    return torch.empty(source.shape, dtype=source.dtype).copy_(source)
