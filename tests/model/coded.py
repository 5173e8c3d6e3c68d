"""Quantised checkpoints of a small decoder, read as the product reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.formats.schemes import Coded
from pypto_serving.model.formats.values import MatrixTensors
from pypto_serving.model.registry import read_config
from tests.model.configs import MOE, write
from tests.quantised import FORMATS

WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "moe_intermediate_size": 64}
CODED = sorted(set(FORMATS) - {"w8a8"})


def inventory_of(path: Path) -> tuple[DecoderInventory, StoredTensors]:
    tensors = StoredTensors(path, lambda *_: None)
    inventory = DecoderInventory(read_config(path).model, tensors.headers)
    tensors.require(inventory.expected(), inventory.ignores)
    return inventory, tensors


def read(inventory: DecoderInventory, tensors: StoredTensors, module: str) -> Any:
    scheme: Coded = inventory.schemes[module]  # type: ignore[assignment]
    n, k = inventory.weights()[f"{module}.weight"]
    return scheme.read(MatrixTensors(tensors, module), n, k)


def schemes(path: Path, section: dict[str, Any]) -> dict[str, str]:
    """Names of schemes by module of a model with experts."""
    inventory = DecoderInventory(read_config(write(path, MOE, quantization_config=section)).model)
    return {module: scheme.name for module, scheme in inventory.schemes.items()}
