"""NpuBackend: prepare a model on a device, in the order that the runtime's fork requires."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from pypto_serving.backend.base import Backend, Fault, Program, Progress
from pypto_serving.backend.native import read_served
from pypto_serving.backend.npu.chips import Chips
from pypto_serving.backend.npu.keeper import keep_group
from pypto_serving.backend.npu.program import STAGING_BYTES, Device, DeviceBuffers, DevicePages, NpuProgram
from pypto_serving.backend.npu.programs import ProgramLibrary, Programs, find_library
from pypto_serving.backend.npu.runtime import Runtime
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.kernels import Engine, NativeSampler
from pypto_serving.kernels.abi import runnable
from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.contract import StageName, of_role, same_arguments
from pypto_serving.model.fingerprint import program_fingerprint, unchanged
from pypto_serving.model.registry import CheckpointConfig
from pypto_serving.threads import start_thread
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.sampler import Sampler

REPORT_S, MOST_REPORTS = 10.0, 180
"""Interval and number of progress reports while programs are compiled or prepared: half an hour in all."""


class NpuBackend(Backend):
    """Prepares compiled programs on the platform of `backend_options`.

    The n tensor ranks of a topology are n devices of one program, not processes. Replica i uses devices from i * n on.

    Order: contract, compiled programs, shared memory, process group; then the runtime forks; then resident tensors, and
    everything that starts threads.
    """

    _programs: Programs | None = None
    _device: Device | None = None
    _chips: Chips | None = None
    _keeper: subprocess.Popen[bytes] | None = None

    def prepare(self, progress: Progress) -> Program:
        """Return the program. Raises ModelError or ConfigError."""
        with unchanged(self.config.model.path):
            return self._prepare(self.config, progress)

    def _prepare(self, config: EngineConfig, progress: Progress) -> NpuProgram:
        size = config.parallel.topology.tensor
        devices = range(config.parallel.replica * size, config.parallel.replica * size + size)
        runtime = Runtime(str(config.worker.backend_options["platform"]), devices)
        if config.cache.tiers and not runtime.copies_parts:
            raise ConfigError(
                f"this PyPTO runtime ({runtime.revision}) copies whole tensors only, so KV blocks cannot be kept in "
                f"lower tiers; drop kv-{config.cache.tiers[0].tier}"
                + ("-memory" if config.cache.tiers[0].tier == "host" else "")
            )
        checkpoint = read_served(config)
        library = find_library(config, checkpoint)
        self._device = self._open(runtime, library, progress)
        atexit.register(self._device.close)
        embedding = self._load(library, checkpoint, progress)
        memory = DevicePages(
            self._device, library.contract, config.cache.num_blocks[0], config.cache.groups[0].block_bytes
        )
        numerics = (runtime.platform, runtime.revision, library.contract.layout, library.sources.hex())
        name = f"qwen3-pypto {library.contract.revision}"
        identity = program_fingerprint(config, progress, checkpoint.architecture, name, *numerics)
        return NpuProgram(config, library.contract, self._device, memory, identity, _sampler(), embedding)

    def watch(self, fault: Fault) -> None:
        assert self._chips is not None
        self._chips.fault = fault

    def _open(self, runtime: Runtime, library: ProgramLibrary, progress: Progress) -> Device:
        """Load the compiled programs, or compile them, allocate shared memory, and let the runtime fork."""
        kept = self._programs = Programs(runtime, self.config.worker.cache_dir)
        contract, programs = library.contract, dict[StageName, Any]()
        sizes = {**contract.most, "ROWS": self._rows(library)}
        with _repeated(progress), kept.locked():
            for stage, host in library.hosts.items():
                programs[stage] = kept.get(stage, host, library.sources, contract.stages[stage], sizes)
            buffers = DeviceBuffers(contract, STAGING_BYTES)
            self._keeper = keep_group()
            self._chips = Chips(self._keeper.pid)
            device = Device(runtime, contract, programs, buffers, self._chips)
        progress("programs", 1, 1)
        return device

    def _rows(self, library: ProgramLibrary) -> int:
        """Return the rows of each KV pool: those of all pages in all layers."""
        caches = of_role(same_arguments(library.contract.stages).values(), "cache")
        widths = sum(argument.num_bytes({"ROWS": 1}) for argument in caches)
        return self.config.cache.num_blocks[0] * self.config.cache.groups[0].block_bytes // widths

    def _load(self, library: ProgramLibrary, checkpoint: CheckpointConfig, progress: Progress) -> Any:
        """Upload weights and zeroed caches; return the embedding table if the host embeds tokens, else None."""
        assert self._device is not None
        contract, arguments = library.contract, same_arguments(library.contract.stages)
        inventory = checkpoint.family.inventory(checkpoint.model)
        tensors = StoredTensors(self.config.model.path, progress)
        tensors.require(inventory.expected(), inventory.ignores)
        sizes, missing = {"ROWS": self._rows(library)}, set(arguments)
        for name, pieces in contract.weights(tensors):
            self._device.upload(arguments[name], arguments[name].resolve(sizes), pieces)
            missing.remove(name)
        for argument in of_role(arguments.values(), "cache"):
            zeros = np.zeros(STAGING_BYTES, np.uint8)
            whole, rest = divmod(argument.num_bytes(sizes), STAGING_BYTES)
            self._device.upload(argument, argument.resolve(sizes), [*[zeros] * whole, zeros[:rest]])
            missing.remove(argument.name)
        if missing:
            raise ModelError(f"nothing fills the arguments {', '.join(sorted(missing))}")
        tensors.finish()
        return contract.embedding(tensors)


@contextlib.contextmanager
def _repeated(progress: Progress) -> Iterator[None]:
    """Repeat the last report MOST_REPORTS times: a compile may take longer than a worker may be silent."""
    ended = threading.Event()

    def report() -> None:
        for _ in range(MOST_REPORTS):
            progress("programs", 0, 1)
            if ended.wait(REPORT_S):
                return

    thread = start_thread("compile-progress", report)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sampler() -> Sampler | None:
    """Return the kernels' sampler on one thread, or None if the kernels were not built."""
    if not (sets := runnable()):
        return None
    return NativeSampler(Engine(sets[0], 1, os.sched_getaffinity(0)))
