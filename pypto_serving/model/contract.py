"""Contracts: the arguments of a model's compiled PyPTO programs, and their values for a step. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.types.arrays import Array, BFloat16Array, Int32Array
from pypto_serving.types.kv import DTYPE_BYTES, Spans

Role = Literal["input", "output", "weight", "cache"]
StageName = Literal["prefill", "decode"]
Sizes = Mapping[str, int]
"""Values of named sizes."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a program. Named sizes in `shape` depend on the dispatch, or on the KV pool.

    Inputs and outputs lie in shared memory; weights and caches on the program's device number `device`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    role: Role = "weight"
    device: int = 0

    def resolve(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape for these sizes."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    def num_bytes(self, sizes: Sizes) -> int:
        """Return the bytes for these sizes."""
        return math.prod(self.resolve(sizes)) * DTYPE_BYTES[self.dtype]


class StepArrays(Protocol):
    """The attributes of a dispatch that a contract reads, a part of StepInputs."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def positions(self) -> Int32Array: ...
    @property
    def query_start(self) -> Int32Array: ...
    @property
    def context_lens(self) -> Int32Array: ...
    @property
    def slot_mapping(self) -> tuple[Int32Array, ...]: ...
    @property
    def block_tables(self) -> tuple[Int32Array, ...]: ...


class Contract(Protocol):
    """Arguments and results of a family's programs, in one revision.

    revision, layout: names of the programs and of the order of dimensions in pages; parts of the fingerprint.
    stages: arguments of each program, in order.
    logits: the outputs that have the logits of each row's last token, float32 [rows, vocabulary with padding]; if there
        are several, each has a part of the vocabulary.
    most: the largest values of sizes that depend on the dispatch.
    """

    revision: str
    layout: str
    stages: Mapping[StageName, tuple[Argument, ...]]
    logits: tuple[str, ...]
    most: Sizes

    def inputs(self, stage: StageName, step: StepArrays, embedding: BFloat16Array | None) -> dict[str, Array]:
        """Return the values of a dispatch's inputs; `embedding` [vocab, hidden] if the host embeds tokens."""

    def embedding(self, tensors: StoredTensors) -> BFloat16Array | None:
        """View the table with which the host embeds tokens; None if the device embeds them."""

    def weights(self, tensors: StoredTensors) -> Iterator[tuple[str, Iterable[Array]]]:
        """Yield each weight by its argument's name, in pieces along dimension 0; bfloat16 as uint16."""

    def pages(self, num_pages: int, page: int) -> Mapping[str, Spans]:
        """Return the bytes of a page in each cache; a KV block has them in this order."""


def bind(arguments: Sequence[Argument], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Check that `shapes` are those of all arguments, and return the sizes they choose. Raises ValueError.

    The runtime checks no shape of a tensor in shared memory: a wrong one gives NaN.
    """
    if surplus := shapes.keys() - {argument.name for argument in arguments}:
        raise ValueError(f"there is no argument {', '.join(sorted(surplus))}")
    sizes: dict[str, int] = {}
    for argument in arguments:
        shape = shapes.get(argument.name)
        if shape is None:
            raise ValueError(f"argument {argument.name} is missing")
        if len(shape) != len(argument.shape):
            raise ValueError(f"argument {argument.name} has the shape {shape}, but must have {argument.shape}")
        for wanted, found in zip(argument.shape, shape, strict=True):
            expected = sizes.setdefault(wanted, found) if isinstance(wanted, str) else wanted
            if found != expected:
                raise ValueError(
                    f"argument {argument.name} has the shape {shape}, but must have {argument.shape}"
                    + (f" with {wanted} = {expected}" if isinstance(wanted, str) else "")
                )
    return sizes


def of_role(arguments: Iterable[Argument], *roles: Role) -> list[Argument]:
    """Return the arguments of these roles, in order."""
    return [argument for argument in arguments if argument.role in roles]


def same_arguments(stages: Mapping[Any, Sequence[Argument]]) -> dict[str, Argument]:
    """Return weights and caches by name. Raises ValueError if two stages, which share them, disagree about one."""
    found: dict[str, Argument] = {}
    for arguments in stages.values():
        for argument in of_role(arguments, "weight", "cache"):
            if found.setdefault(argument.name, argument) != argument:
                raise ValueError(f"stages disagree about {argument.name}")
    return found
