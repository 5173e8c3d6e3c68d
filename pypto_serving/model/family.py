"""The interface of a model family: its configuration, tensors, KV groups and programs. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.contents import Inventory
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec

DEFAULT_BLOCK_SIZE = 32
"""Tokens per KV block: one panel of the CPU kernels."""


class ParseConfig(Protocol):
    """Parse the object in config.json at `source`. Raises ModelError naming an unsupported key and value."""

    def __call__(self, raw: dict[str, Any], source: str) -> Any: ...


class TakeInventory(Protocol):
    """List the tensors that a configuration needs; `headers`, if any, settle what the configuration leaves open."""

    def __call__(self, config: Any, headers: Mapping[str, StoredTensor] = ..., /) -> Inventory: ...


class MakeGroups(Protocol):
    """List the KV groups of a configuration in `dtype` with blocks of `block_size` tokens."""

    def __call__(self, config: Any, /, dtype: str, block_size: int) -> tuple[KVCacheGroupSpec, ...]: ...


@dataclass(frozen=True, slots=True)
class Serving:
    """The options that decide what a checkpoint is served as.

    dtype: `auto`, `bfloat16` or `float32`; auto is the checkpoint's own, with float16 served as bfloat16, and bfloat16
        beside quantised weights.
    block_size: tokens per KV block, where groups do not have their own.
    head, kv_dtype: `int8` for an output layer, and for keys and values, that will be rounded to that.
    drafts: whether draft layers are served too.
    """

    dtype: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    head: str = "auto"
    kv_dtype: str = "auto"
    drafts: bool = False


DEFAULT_SERVING = Serving()


class MakeSpec(Protocol):
    """Describe a checkpoint to the engine, but for its path and names; the dtype is not `auto`.

    `headers`, if any, settle what the configuration leaves open.
    """

    def __call__(self, config: Any, serving: Serving, headers: Mapping[str, StoredTensor], /) -> ModelSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The parts of one model family. Programs are named `module:name` and imported on first use.

    with_drafts: returns a configuration with its draft layers, or raises ModelError; None for a family without any.
    """

    parse: ParseConfig
    inventory: TakeInventory
    kv_groups: MakeGroups
    spec: MakeSpec
    torch_program: str
    kernel_program: str
    conversion: str
    with_drafts: Callable[[Any], Any] | None = None

    @property
    def program(self) -> Any:
        """Import the class that runs the model in torch, and torch itself."""
        return _load(self.torch_program)

    @property
    def plan_conversion(self) -> Any:
        """Import what plans conversions to other formats; see model/convert."""
        return _load(self.conversion)

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
