"""Converted checkpoints, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import Encoding
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.formats.values import MatrixTensors, dequantised
from pypto_serving.model.registry import read_config
from pypto_serving.types.arrays import Float32Array


def converted(source: Path, target: Path, encoding: Encoding) -> Path:
    convert(source, target, encoding, lambda *_: None)
    return target


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def values(path: Path) -> dict[str, Float32Array]:
    """What the coded matrices of a checkpoint mean, by module."""
    tensors = StoredTensors(path, lambda *_: None)
    inventory = DecoderInventory(read_config(path).model, tensors.headers)
    found = {}
    for module, scheme in inventory.schemes.items():
        if scheme.name:
            coded: Any = scheme
            n, k = inventory.weights()[f"{module}.weight"]
            found[module] = dequantised(coded.read(MatrixTensors(tensors, module), n, k))
    return found
