"""The interface of a model family: its configuration, tensors, KV groups and programs. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pypto_serving.model.contents import Inventory
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec


class ParseConfig(Protocol):
    """Parse the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""

    def __call__(self, raw: dict[str, Any], source: str) -> Any: ...


class MakeGroups(Protocol):
    """List the KV groups of a configuration in `dtype` with blocks of `block_size` tokens."""

    def __call__(self, config: Any, /, dtype: str, block_size: int) -> tuple[KVCacheGroupSpec, ...]: ...


class MakeSpec(Protocol):
    """Describe a checkpoint at `path` to the engine."""

    def __call__(self, config: Any, /, path: str, architecture: str, dtype: str, block_size: int) -> ModelSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The parts of one model family. Programs are named `module:class` and imported on first use."""

    parse: ParseConfig
    inventory: Callable[[Any], Inventory]
    kv_groups: MakeGroups
    spec: MakeSpec
    torch_program: str
    kernel_program: str

    @property
    def program(self) -> Any:
        """Import the class that runs the model in torch, and torch itself."""
        return _load(self.torch_program)

    @property
    def native_program(self) -> Any:
        """Import the class that runs the model on the CPU kernels."""
        return _load(self.kernel_program)


def refused_dtype(dtype: str) -> tuple[str, str]:
    """Name the option `dtype` and say why the CPU kernels refuse its value; both are empty if they take it."""
    return ("", "") if dtype == "bfloat16" else ("dtype", f"the kernels serve bfloat16 only, not {dtype}")


def _load(target: str) -> Any:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)
