"""PyPTO's runtime, in the two known revisions: find out which is installed, shared memory, compiling, preparing.

Both have version 0.1.0, so they are distinguished by their attributes. They differ for an engine in two points:

| revision | a copy may begin | sources of uploads               |
|----------|------------------|----------------------------------|
| 2026-06  | anywhere         | shared memory older than prepare |
| 2026-08  | at an allocation | any                              |
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import torch

from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import Argument, Sizes
from pypto_serving.types.arrays import Array
from pypto_serving.util import hash128

RuntimeRevision = Literal["2026-06", "2026-08"]
_REVISIONS: dict[RuntimeRevision, str] = {"2026-06": "de48ab415", "2026-08": "e2d0f78ae"}
META_FILE = "distributed_meta.json"
"""The runtime's description of a compiled program; a folder with this file is complete."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor in shared memory, and the same memory as a numpy array, with bfloat16 as uint16."""

    tensor: torch.Tensor
    array: Array

    @classmethod
    def zeros(cls, dtype: str, *shape: int) -> SharedTensor:
        """Allocate zeros. Must precede `prepare`, or the chip processes do not see them."""
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype)).share_memory_()
        return cls(tensor, _array(tensor))


def _array(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("<u2")
    array: Array = tensor.numpy()
    return array


class Runtime:
    """The installed runtime on a platform and some devices. Raises ConfigError if no known revision is installed."""

    def __init__(self, platform: str, devices: Sequence[int]) -> None:
        self.platform, self.devices = platform, list(devices)
        self._module = _import("pypto.runtime")
        self._compiled = _import("pypto.ir.distributed_compiled_program")
        self.revision = self._find_revision()
        self.copies_parts = self.revision == "2026-06"

    def _find_revision(self) -> RuntimeRevision:
        worker, config = (
            getattr(module, name, None)
            for module, name in ((self._module, "DistributedWorker"), (self._compiled, "DistributedConfig"))
        )
        needed = ("run", "alloc_tensor", "malloc", "copy_to", "copy_from", "close")
        if worker is None or config is None or any(not hasattr(worker, name) for name in needed):
            raise _mismatch(f"{self._module.__file__} has no DistributedWorker with {', '.join(needed)}")
        fields, has_submit = config.__dataclass_fields__, hasattr(worker, "submit")
        if "block_dim" in fields and not has_submit:
            return "2026-06"
        if "block_dim" not in fields and has_submit:
            return "2026-08"
        raise _mismatch(f"{self._module.__file__} is another one")

    @property
    def identity(self) -> bytes:
        """Hash sizes and times of the runtime's files, since its version does not identify it."""
        root = Path(_import("pypto").__file__).parent
        files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
        states = [(path, path.stat()) for path in files]
        words = (f"{path.relative_to(root)} {state.st_size} {state.st_mtime_ns}" for path, state in states)
        return hash128(self.revision.encode(), *(word.encode() for word in words))

    def compile(self, host: Any, arguments: Sequence[Argument], sizes: Sizes, folder: Path) -> None:
        """Compile a host function for arguments of these sizes into a folder. Raises ConfigError.

        The later revision reads the arguments from the function's annotations.
        """
        sampled = arguments if self.revision == "2026-06" else ()
        samples = [torch.empty(each.resolve(sizes), dtype=getattr(torch, each.dtype)) for each in sampled]
        config = self._module.RunConfig(
            platform=self.platform,
            distributed_config=self._distributed(),
            save_kernels=True,
            save_kernels_dir=str(folder),
        )
        try:
            host.compile(*samples, config=config)
        except Exception as error:
            line = " ".join(str(error).split())
            raise ConfigError(f"PyPTO cannot compile for {self.platform}: {type(error).__name__}: {line}") from error

    def load(self, folder: Path) -> Any:
        """Load a compiled program. Raises ConfigError if it is damaged, or for another platform."""
        program = self._compiled.DistributedCompiledProgram
        try:
            loaded = program.from_dir(folder, distributed_config=self._distributed())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the compiled program in {folder} cannot be loaded ({error}); delete it") from None
        if loaded.platform != self.platform:
            raise ConfigError(f"the program in {folder} is for {loaded.platform}, not {self.platform}; delete it")
        return loaded

    def prepare(self, programs: Sequence[Any]) -> Any:
        """Fork the chip processes, for all programs together, and return the runtime's worker."""
        first, *others = programs
        return first.prepare(extra_compiled=others)

    def allocate(
        self, worker: Any, shape: Sequence[int], dtype: torch.dtype, init: torch.Tensor | None, device: int
    ) -> Any:
        """Allocate a resident tensor on a device, and fill it with `init` if the revision can do that.

        `alloc_tensor` of 2026-06 works only for the first device.
        """
        if not self.copies_parts:
            return worker.alloc_tensor(shape, dtype, init=init, worker_id=device)
        pointer = worker.malloc(math.prod(shape) * dtype.itemsize, worker_id=device)
        return self._module.DeviceTensor(pointer, shape, dtype)

    def _distributed(self) -> Any:
        """Return the devices to use and, for the simulator of 2026-06, a low number of its busily polling threads."""
        simulates = self.platform.endswith("sim") and self.revision == "2026-06"
        return self._compiled.DistributedConfig(device_ids=self.devices, **({"block_dim": 1} if simulates else {}))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise _mismatch(f"{name} cannot be imported ({' '.join(str(error).split())})") from None


def _mismatch(problem: str) -> ConfigError:
    known = " or ".join(f"{commit} ({revision})" for revision, commit in _REVISIONS.items())
    return ConfigError(f"the npu backend needs hw-native-sys/pypto at {known}, but {problem}; see docs/npu.md")
