"""CudaBackend: serve a checkpoint on one NVIDIA card."""

from __future__ import annotations

import os

import torch

from pypto_serving.backend.base import Backend, Progress
from pypto_serving.backend.cuda.compiling import compile_ahead, kernel_identity
from pypto_serving.backend.cuda.device import Card, CudaCard, NoCard
from pypto_serving.backend.cuda.program import CudaProgram
from pypto_serving.backend.native import read_served
from pypto_serving.errors import ConfigError
from pypto_serving.kernels.cuda.launch import Call, Launch, recording
from pypto_serving.kernels.cuda.products import BULK_COPIES
from pypto_serving.model.card_weights import CardWeights
from pypto_serving.model.fingerprint import program_fingerprint, unchanged
from pypto_serving.model.registry import CheckpointConfig
from pypto_serving.util import hash128


class CudaBackend(Backend):
    """Prepares the program of a card: replica i has card i.

    Kernels are compiled by copies of this process before it opens the card, since a process that has opened one cannot
    be copied.
    """

    def prepare(self, progress: Progress) -> CudaProgram:
        """Compile, load weights, allocate the KV memory and capture the graphs. Raises ModelError or ConfigError."""
        with unchanged(self.config.model.path):
            checkpoint = read_served(self.config)
            try:
                device, fingerprint = self._open(checkpoint, progress), self._fingerprint(checkpoint, progress)
                program = self._program(checkpoint, device, fingerprint, progress)
                program.capture(progress)
            except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
                if "out of memory" not in str(error):
                    raise
                needed = str(error).splitlines()[0].partition(". GPU")[0]
                raise ConfigError(f"the card or the host has too little memory ({needed}); lower kv-memory") from None
            return program

    def _open(self, checkpoint: CheckpointConfig, progress: Progress) -> Card:
        """Compile the kernels and open the card."""
        config, index = self.config, self.config.parallel.replica
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as the memory plan counts cards
        if tuple(config.worker.backend_options.get("capability", ())) >= BULK_COPIES:  # those that `NoCard` lists
            compile_ahead(self.launches(checkpoint), index, config.worker.cache_dir, progress)
        return CudaCard(index)

    def _fingerprint(self, checkpoint: CheckpointConfig, progress: Progress) -> bytes:
        numerics, name = kernel_identity().hex(), checkpoint.family.program_on_cards.name
        return program_fingerprint(self.config, progress, checkpoint.architecture, name, numerics)

    def _program(
        self, checkpoint: CheckpointConfig, device: Card, fingerprint: bytes, progress: Progress
    ) -> CudaProgram:
        config, program = self.config, checkpoint.family.program_on_cards
        with device.torch_device:
            weights = CardWeights(config.model.path, config.model.dtype, progress)
            model = program(checkpoint.model, weights, config)
            return CudaProgram(model, config, hash128(fingerprint, device.name.encode()), device)

    def launches(self, checkpoint: CheckpointConfig) -> list[Launch]:
        """List the launches of all graphs and of the sampler, with tensors that have no memory."""
        calls: list[Call] = []
        with recording(calls.append):
            for work in self._program(checkpoint, NoCard(), b"", lambda *_: None).works():
                work()
        return [call for call in calls if isinstance(call, Launch)]
