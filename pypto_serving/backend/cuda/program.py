"""CudaProgram: a dispatch is one copy to the card, a graph of the layers, one of the output layer, and sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pypto_serving.backend.base import BlockMemory, Draft, Progress, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.cuda.device import Card, CardBlocks, CardEvent
from pypto_serving.backend.cuda.graphs import StepSizes, StepSizing
from pypto_serving.backend.cuda.sampler import DeviceSampler
from pypto_serving.kernels.cuda.launch import Call, run
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.sampler import Sampler
from pypto_serving.util import ceil_div


class CardModel(Protocol):
    """A model on a card: launches that are the same for dispatches of the same sizes."""

    pages: KVPages
    logits: Tensor
    """float32 [rows, vocab]: those of the last call of `compute_logits`."""
    tile_queries: int
    """Queries in a tile of a chunk."""

    def compute_layers(self, step: DispatchTensors, last_tokens: Tensor) -> None:
        """Write the keys and values of a dispatch's tokens, and its normalised hidden states."""

    def compute_logits(self, rows: Tensor) -> None:
        """Compute logits of the hidden states at the indices `rows`, int32 [n]."""


class _InFlight(NamedTuple):
    """The pinned memory of one dispatch in flight."""

    pinned: Tensor
    number: int


class CudaProgram:
    """Owns the graphs of a model, and the memory of dispatches in flight. Implements Program.

    All dispatches share one packed copy on the device, since they run one after the other.
    """

    sampler: Sampler | None = None
    draft: Draft | None = None

    def __init__(self, model: CardModel, config: EngineConfig, fingerprint: bytes, device: Card) -> None:
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.fingerprint = fingerprint
        self.memory: BlockMemory = CardBlocks(
            [model.pages.data.view(torch.uint8).view(model.pages.num_blocks, -1)], device
        )
        self._model, self._device = model, device
        self._sizing = StepSizing(config.limits, config.cache.groups[0].block_size, model.tile_queries)
        self._rows = config.limits.traits.padded_rows
        rows, slots = config.limits.max_rows, config.limits.held_dispatches
        start = ceil_div(rows, 4) * 4  # of the step, in words of 16 bytes
        most = start + max(sizes.num_ints for sizes in self._sizing.largest)
        packed = torch.zeros(most, dtype=torch.int32, device=device.torch_device)
        self._packed, self._logits_rows, self._step = packed, packed[:start], packed[start:]
        self._free = deque(_InFlight(device.pinned(4 * most).view(torch.int32), i) for i in range(slots))
        self._held: deque[tuple[_InFlight, CardEvent, bool]] = deque()
        self._sampler = DeviceSampler(config.limits, config.model.vocab_size, device, slots)
        self._layers: dict[StepSizes, Call] = {}
        self._outputs: dict[int, Call] = {}

    def capture(self, progress: Progress) -> None:
        """Capture the graphs of all usual sizes, the largest first, since smaller ones reuse their memory."""
        sizes = [*reversed(self._sizing.chunks), *reversed(self._sizing.decodes)]
        rows = sorted({each.rows for each in self._sizing.decodes}, reverse=True)
        for done, each in enumerate(sizes):
            progress("graphs", done, len(sizes) + len(rows))
            self._layers[each] = self._device.capture(self._layer_work(each))
        for done, count in enumerate(rows):
            progress("graphs", len(sizes) + done, len(sizes) + len(rows))
            self._outputs[count] = self._device.capture(self._output_work(count))
        self._sampler.launch_all(self._model.logits)
        progress("graphs", 1, 1)

    def works(self) -> Iterator[Callable[[], None]]:
        """List the work of all graphs, and of the sampler."""
        yield from map(self._layer_work, [*self._sizing.chunks, *self._sizing.decodes])
        yield from map(self._output_work, {each.rows for each in self._sizing.decodes})
        yield partial(self._sampler.launch_all, self._model.logits)

    def _layer_work(self, sizes: StepSizes) -> Callable[[], None]:
        return partial(self._model.compute_layers, sizes.tensors(self._step), self._sampler.last_tokens)

    def _output_work(self, rows: int) -> Callable[[], None]:
        """Return the output layer of `rows` rows. Their indices are at the same place for all sizes of a dispatch."""
        return partial(self._model.compute_logits, self._logits_rows[:rows])

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None) -> None:
        """Queue a dispatch on the device."""
        assert sampling is not None, "the device samples"
        slot, count = self._free.popleft(), len(inputs.logits_rows)
        if len(inputs.token_ids):
            sizes, pinned = self._sizing.of(inputs), slot.pinned.numpy()
            first = len(self._logits_rows)
            pinned[:count], pinned[count:first] = inputs.logits_rows, 0
            used = first + sizes.pack(inputs, self._model.tile_queries, pinned[first:])
            self._device.copy(self._packed[:used], slot.pinned[:used])
            run(self._layers.get(sizes) or self._layer_work(sizes))
        if count:
            rows = next(each for each in self._rows if each >= count)
            run(self._outputs.get(rows) or self._output_work(rows))
            self._sampler.submit(slot.number, self._model.logits, inputs, sampling)
        self._held.append((slot, self._device.record(), count > 0))

    def collect(self) -> StepOutput:
        """Wait for the oldest dispatch, and return the tokens that it sampled."""
        slot, event, samples = self._held.popleft()
        event.synchronize()
        output = StepOutput(sampled=self._sampler.read(slot.number) if samples else DeviceSampler.NOTHING)
        self._free.append(slot)
        return output
