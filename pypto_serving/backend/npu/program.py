"""NpuProgram: run dispatches with the compiled programs. Device: a prepared runtime worker."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pypto_serving.backend.base import BlockMemory, Draft, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.npu.chips import Chips
from pypto_serving.backend.npu.runtime import Runtime, SharedTensor
from pypto_serving.errors import EXIT_CRASH, ConfigError
from pypto_serving.model.contract import Argument, Contract, StageName, bind, of_role
from pypto_serving.types.arrays import Array, BFloat16Array, BlockBytes, Float32Array, UInt8Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans
from pypto_serving.types.sampler import Sampler

STAGING_BYTES = 16 << 20
"""Size of the shared memory through which weights and KV blocks are copied."""


class DeviceBuffers:
    """Owns the shared memory, made before the runtime forks: inputs and outputs by stage, and staging memory."""

    def __init__(self, contract: Contract, staging_bytes: int) -> None:
        self.stages = {
            stage: {
                argument.name: SharedTensor.zeros(argument.dtype, *argument.resolve(contract.most))
                for argument in of_role(arguments, "input", "output")
            }
            for stage, arguments in contract.stages.items()
        }
        self.staging = SharedTensor.zeros("uint8", staging_bytes)


class Device:
    """Owns the runtime's worker, and the weights and caches on the device. Any thread may call it.

    The runtime serves one call at a time. It has no time-out, and does not notice when its processes end; `chips` do.
    """

    def __init__(
        self,
        runtime: Runtime,
        contract: Contract,
        programs: Mapping[StageName, Any],
        buffers: DeviceBuffers,
        chips: Chips,
    ) -> None:
        self._contract, self._programs, self._buffers = contract, programs, buffers
        self._runtime = runtime
        self._resident: dict[str, Any] = {}
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()
        self._failed = False
        self._chips = chips
        self._worker = runtime.prepare(list(programs.values()))

    def close(self) -> None:
        """End the chip processes.

        After a failed dispatch they may not answer, and the runtime would wait for them at exit. Then this process ends
        at once, and the keeper ends them.
        """
        if self._failed:
            os._exit(EXIT_CRASH)
        self._chips.closing = True
        with self._lock:
            self._worker.close()

    def upload(self, argument: Argument, shape: tuple[int, ...], pieces: Iterable[Array]) -> None:
        """Allocate a weight or a cache, and fill it with pieces along dimension 0. Raises ConfigError."""
        dtype = getattr(torch, argument.dtype)
        whole = None if self._runtime.copies_parts else _joined(argument, shape, dtype, pieces)
        try:
            tensor = self._runtime.allocate(self._worker, shape, dtype, whole, argument.device)
        except (MemoryError, RuntimeError) as error:
            size = math.prod(shape) * dtype.itemsize
            raise ConfigError(
                f"the device has no {size} bytes for {argument.name} ({error}); lower kv-memory"
            ) from None
        if whole is None:
            self._fill(tensor.data_ptr, tensor.nbytes, argument.device, pieces)
        self._resident[argument.name], self._places[argument.name] = tensor, argument.device

    def _fill(self, start: int, num_bytes: int, device: int, pieces: Iterable[Array]) -> None:
        """Copy pieces to a device's memory from `start` on, through the staging memory."""
        staging, place = self._buffers.staging, start
        for piece in pieces:
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            for begin in range(0, len(data), len(staging.array)):
                part = data[begin : begin + len(staging.array)]
                if place + len(part) > start + num_bytes:
                    raise ValueError(f"more than {num_bytes} bytes are written to a tensor of {num_bytes}")
                staging.array[: len(part)] = part
                self._worker.copy_to(place, staging.tensor.data_ptr(), len(part), worker_id=device)
                place += len(part)
        if place != start + num_bytes:
            raise ValueError(f"{place - start} bytes are written to a tensor of {num_bytes}")

    def run(self, stage: StageName, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Dispatch a program, and return its outputs, which the next dispatch of the stage overwrites.

        Raises ValueError for wrong shapes or dtypes, and the runtime's errors for a failed dispatch.
        """
        arguments, shared = self._contract.stages[stage], self._buffers.stages[stage]
        sizes = bind(of_role(arguments, "input"), {name: value.shape for name, value in inputs.items()})
        tensors: dict[str, SharedTensor] = {}
        for argument in of_role(arguments, "input", "output"):
            tensors[argument.name] = _part(shared[argument.name], argument.resolve(sizes))
        for name, value in inputs.items():
            if value.dtype != tensors[name].array.dtype:
                raise ValueError(f"argument {name} is {value.dtype}, but must be {tensors[name].array.dtype}")
            tensors[name].array[...] = value
        call = [tensors[each.name].tensor if each.name in tensors else self._resident[each.name] for each in arguments]
        bind(arguments, {each.name: tuple(one.shape) for each, one in zip(arguments, call, strict=True)})
        with self._lock:
            try:
                self._worker.run(self._programs[stage], *call)
            except BaseException:
                self._failed = True
                raise
        return {argument.name: tensors[argument.name].array for argument in of_role(arguments, "output")}

    def read(self, name: str, spans: Spans, out: UInt8Array) -> None:
        """Copy the spans of a cache to `out`, one after the other."""
        self._copy(name, spans, out, self._worker.copy_from)

    def write(self, name: str, spans: Spans, content: UInt8Array) -> None:
        """Replace the spans of a cache by `content`."""
        self._copy(name, spans, content, None)

    def _copy(self, name: str, spans: Spans, host: UInt8Array, copy_from: Any) -> None:
        tensor, device, staging, place = self._resident[name], self._places[name], self._buffers.staging, 0
        for begin, end in spans:
            if not 0 <= begin < end <= tensor.nbytes or end - begin > len(staging.array):
                raise ValueError(f"[{begin}, {end}) of {name}, which has {tensor.nbytes} bytes, cannot be copied")
            part = host[place : place + end - begin]
            with self._lock:
                if copy_from is not None:
                    copy_from(staging.tensor.data_ptr(), tensor.data_ptr + begin, len(part), worker_id=device)
                    part[:] = staging.array[: len(part)]
                else:
                    staging.array[: len(part)] = part
                    target = tensor.data_ptr + begin
                    self._worker.copy_to(target, staging.tensor.data_ptr(), len(part), worker_id=device)
            place += end - begin


def _part(shared: SharedTensor, shape: tuple[int, ...]) -> SharedTensor:
    """View the first bytes of a shared tensor in another shape. Raises ValueError if it is too small."""
    count = math.prod(shape)
    if count > shared.array.size:
        raise ValueError(f"a dispatch needs {shape} of a buffer of {shared.array.shape}")
    return SharedTensor(shared.tensor.view(-1)[:count].view(shape), shared.array.reshape(-1)[:count].reshape(shape))


def _joined(argument: Argument, shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[Array]) -> torch.Tensor:
    """Concatenate pieces along dimension 0. Raises ValueError if their size is not that of `shape`."""
    whole, place = torch.empty(tuple(shape), dtype=dtype), 0
    target = whole.view(-1).view(torch.uint8).numpy()
    for piece in pieces:
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        if place + len(data) > len(target):
            raise ValueError(f"{argument.name} has more than {len(target)} bytes")
        target[place : place + len(data)] = data
        place += len(data)
    if place != len(target):
        raise ValueError(f"{argument.name} has {place} bytes, but must have {len(target)}")
    return whole


_Copy = Callable[[str, Spans, BlockBytes], None]


class NpuProgram:
    """A model on a device. Implements Program.

    `submit` returns when the dispatch has ended. The host samples from its logits, since the device's greedy ids would
    hide logits that are not finite.
    """

    draft: Draft | None = None

    def __init__(
        self,
        config: EngineConfig,
        contract: Contract,
        device: Device,
        memory: BlockMemory,
        fingerprint: bytes,
        sampler: Sampler | None,
        embedding: BFloat16Array | None,
    ) -> None:
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.memory, self.fingerprint, self.sampler = memory, fingerprint, sampler
        self._contract, self._device, self._embedding = contract, device, embedding
        self._vocabulary = config.model.vocab_size
        self._logits: Float32Array = np.empty((0, config.model.vocab_size), np.float32)

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> None:
        """Run a dispatch. Any error ends the worker."""
        if not len(inputs.token_ids):
            self._logits = self._logits[:0]
            return
        stage: StageName = "decode" if inputs.kind == "decode" else "prefill"
        outputs = self._device.run(stage, self._contract.inputs(stage, inputs, self._embedding))
        parts = [outputs[name] for name in self._contract.logits]
        logits = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))[:, : self._vocabulary]
        owners = np.searchsorted(inputs.query_start[1:], inputs.logits_rows, side="right")
        every = len(owners) == inputs.num_rows
        self._logits = logits[: len(owners)] if every else logits[owners]

    def collect(self) -> StepOutput:
        """Return the logits of the last token of each row that samples."""
        return StepOutput(logits=self._logits)


class DevicePages:
    """The blocks of one group, spread over several pools; copied for lower tiers. Implements BlockMemory."""

    def __init__(self, device: Device, contract: Contract, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes: tuple[int, ...] = (block_bytes,)
        self._device, self._contract, self._num_blocks = device, contract, num_blocks

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return copies of the blocks."""
        found = self.staging(group, blocks)
        for block, content in zip(blocks, found, strict=True):
            self._each(block, content, self._device.read)
        return found

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return new memory."""
        return [np.empty(self.block_bytes[group], np.uint8) for _ in blocks]

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Copy `contents` into the blocks."""
        for block, content in zip(blocks, contents, strict=True):
            self._each(block, content, self._device.write)

    def _each(self, block: int, content: BlockBytes, copy: _Copy) -> None:
        place = 0
        for name, spans in self._contract.pages(self._num_blocks, block).items():
            size = sum(end - begin for begin, end in spans)
            copy(name, spans, content[place : place + size])
            place += size
