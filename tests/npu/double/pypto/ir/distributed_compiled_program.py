"""What `compile` makes: a folder that describes a program, and the handle that prepares it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import torch

from pypto import REVISION

META = "distributed_meta.json"

_FIELDS: list[Any] = [("device_ids", list, field(default_factory=lambda: [0])), ("num_sub_workers", int, 0)]
if REVISION == "2026-06":
    _FIELDS.append(("block_dim", int, 24))
DistributedConfig = make_dataclass("DistributedConfig", _FIELDS)


@dataclass(frozen=True)
class Parameter:
    """An argument of a program; a size of -1 is dynamic."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    direction: str = "in"


@dataclass(frozen=True)
class Host:
    """A host function, whose kernel is `function` of the Python file at `path`.

    `dispatches` has for each device the kernel's names of the arguments that it gets; without it, one gets all of them.
    """

    path: str
    function: str
    parameters: tuple[Parameter, ...]
    dispatches: tuple[dict[str, str], ...] = ()

    def compile(self, *samples: torch.Tensor, config: Any) -> DistributedCompiledProgram:
        """Write a build folder, by default below the current one; the later revision needs no samples."""
        if samples and len(samples) != len(self.parameters):
            raise TypeError(f"{self.function} takes {len(self.parameters)} tensors, not {len(samples)}")
        if not samples and REVISION == "2026-06":
            raise TypeError(f"{self.function} has bare annotations: samples are needed")
        for parameter, sample in zip(self.parameters, samples, strict=False):
            if sample.dtype != getattr(torch, parameter.dtype) or not fits(parameter.shape, sample.shape):
                raise TypeError(f"{parameter.name} is {sample.dtype} {tuple(sample.shape)}")
        if config.save_kernels_dir is None:
            Path("build_output").mkdir(exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir="build_output", prefix=self.function)).absolute()
        else:
            folder = Path(config.save_kernels_dir)
            folder.mkdir(parents=True)
        params = [{**vars(each), "name": f"{each.name}__ssa_v0"} for each in self.parameters]
        meta = {"platform": config.platform, "params": params, "entry": [self.path, self.function]}
        meta["dispatches"] = self.dispatches or [{each.name: each.name for each in self.parameters}]
        meta["device_ids"] = config.distributed_config.device_ids
        (folder / META).write_text(json.dumps(meta))
        return DistributedCompiledProgram.from_dir(folder)


class DistributedCompiledProgram:
    """A compiled program in its folder."""

    def __init__(self, folder: Path, meta: dict[str, Any], config: Any) -> None:
        self.output_dir, self.platform, self.distributed_config = folder, meta["platform"], config
        self.entry = meta["entry"]
        self.parameters = [Parameter(**each) for each in meta["params"]]
        names = [parameter.name.partition("__ssa_v")[0] for parameter in self.parameters]
        self.dispatches = [
            [(ours, names.index(theirs)) for ours, theirs in each.items()] for each in meta["dispatches"]
        ]

    @classmethod
    def from_dir(cls, output_dir: Any, *, distributed_config: Any = None) -> DistributedCompiledProgram:
        """Load a build folder."""
        path = Path(output_dir) / META
        if not path.exists():
            raise FileNotFoundError(f"{path} not found")
        meta = json.loads(path.read_text())
        return cls(path.parent, meta, distributed_config or DistributedConfig(device_ids=meta["device_ids"]))

    def prepare(self, config: Any = None, *, extra_compiled: Sequence[Any] = ()) -> Any:
        """Fork a worker for this program and others."""
        from pypto.runtime import DistributedWorker

        return DistributedWorker([self, *extra_compiled])


def fits(shape: Sequence[int], found: Sequence[int]) -> bool:
    """Whether a tensor has the static sizes."""
    return len(shape) == len(found) and all(a in (-1, b) for a, b in zip(shape, found, strict=True))
