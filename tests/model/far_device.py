"""Runs a torch program on a device that this machine need not have: `python -m tests.model.far_device PATH...`.

`far` is a device of torch whose tensors are CPU tensors in disguise. As on a GPU, operations refuse to mix them with
tensors of the CPU, except for copies and single numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from pypto_serving.model.attention import StepTensors
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.registry import Serving, load_spec, read_config
from pypto_serving.types.kv import KVCacheGroupSpec
from tests.configs import make_config

CHUNKS = (64, 40, 8, 1, 7)
BLOCKS, TOKENS = 100, sum(CHUNKS)

_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far:0")


class FarTensor(Tensor):
    """A tensor on `far`; its content is `near`."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        layout = {"strides": near.stride(), "storage_offset": near.storage_offset()}
        far: FarTensor = make(cls, near.shape, dtype=near.dtype, device=FAR, **layout)
        far.near = near
        return far

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class FarMode(TorchDispatchMode):
    """Also sees operations without far arguments, those that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on near tensors; raises RuntimeError where a GPU would refuse it."""
    name = func.overloadpacket.__name__
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    far = {id(tensor.near): tensor for tensor in tensors if isinstance(tensor, FarTensor)}
    near = [tensor for tensor in tensors if not isinstance(tensor, FarTensor) and tensor.dim()]
    if far and near and name not in ("copy_", "_to_copy"):
        raise RuntimeError(f"{func} mixes devices")
    is_far = isinstance(args[0], FarTensor) if name == "copy_" else bool(far)
    if kwargs.get("device") is not None:
        is_far = torch.device(kwargs["device"]).type == FAR.type
        kwargs = kwargs | {"device": torch.device("cpu")}
        if is_far and kwargs.get("generator") is not None:
            raise RuntimeError(f"{func} draws from a generator of the CPU")
    out = func(*tree_map(_near, args), **tree_map(_near, kwargs))

    def disguise(value: Any) -> Any:
        return far[id(value)] if id(value) in far else FarTensor(value)

    return tree_map(lambda value: disguise(value) if is_far and isinstance(value, Tensor) else value, out)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> FarTensor:
    """Below dispatch, `torch.tensor` asks for this; and copies into what it gets."""
    return FarTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _near(target).copy_(_near(source))
    return target


def make_step(device: torch.device, groups: tuple[KVCacheGroupSpec, ...], start: int, count: int) -> StepTensors:
    """Tokens [start, start + count) of the one sequence; logits of the last."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, TOKENS)[start : start + count].tolist()
    tables = [rng.permutation(np.arange(1, BLOCKS))[: -(-TOKENS // g.block_size)].tolist() for g in groups]
    positions = range(start, start + count)

    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(device)

    return StepTensors(
        token_ids=tensor(ids),
        positions=tensor(list(positions)),
        query_start=tensor([0, count]),
        context_lens=tensor([start + count]),
        logits_rows=tensor([count - 1] if count else []),
        slots=tuple(
            tensor([table[p // g.block_size] * g.block_size + p % g.block_size for p in positions])
            for g, table in zip(groups, tables, strict=True)
        ),
        block_tables=tuple(tensor([table]) for table in tables),
    )


def run(path: Path, device: torch.device) -> list[Tensor]:
    """Logits of the last token of each chunk, and of an empty step; only the constructor is told the device."""
    spec, checkpoint = load_spec(path, Serving("float32")), read_config(path)
    config = make_config(
        model=str(path),
        backend="cpu",
        dtype="float32",
        vocab_size=spec.vocab_size,
        groups=spec.kv_groups,
        num_blocks=(BLOCKS,) * len(spec.kv_groups),
        max_model_len=512,
        kernels="torch",
    )
    with device:
        weights = TorchWeights(path, "float32", lambda *_: None)
        program = checkpoint.family.program(checkpoint.model, weights, config)
    starts = np.cumsum((0, *CHUNKS))[:-1].tolist()
    steps = [*zip(starts, CHUNKS, strict=True), (TOKENS, 0)]
    return [program.forward(make_step(device, spec.kv_groups, *step)) for step in steps]


def main(path: str) -> None:
    """Print the largest difference between what a model says there and here, on a line of its own."""
    with torch.no_grad():
        here = run(Path(path), torch.device("cpu"))
        with FarMode():
            there = run(Path(path), FAR)
    assert all(isinstance(logits, FarTensor) for logits in there)
    pairs = list(zip(here, map(_near, there), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    print(max(float((a - b).abs().max()) for a, b in pairs if len(a)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        main(path)
