"""NpuProgram: dispatches become runs of the compiled prefill and decode programs. DevicePages: its KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pypto_serving.backend.base import Draft, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.block_memory import BlockMemory
from pypto_serving.backend.npu.device import Device
from pypto_serving.model.contract import Contract, StageName
from pypto_serving.types.arrays import BFloat16Array, BlockBytes, Float32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans
from pypto_serving.types.sampler import Sampler

_Copy = Callable[[str, Spans, BlockBytes], None]


class NpuProgram:
    """A model on a device. Implements Program.

    A dispatch ends before `submit` returns. The host samples from its logits: the device's greedy ids would hide logits
    that are not finite.
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
        """Run a dispatch. Whatever it raises ends the worker."""
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
    """One group of blocks, whose bytes lie in several pools; copied for lower tiers. Implements BlockMemory."""

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
