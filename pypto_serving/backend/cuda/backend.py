"""CudaBackend: serve a checkpoint on one NVIDIA card."""

from __future__ import annotations

import pkgutil

import torch

from pypto_serving.backend.base import Backend, Progress
from pypto_serving.backend.cuda.compiling import compile_ahead, kernel_identity
from pypto_serving.backend.cuda.device import Card, CudaCard, NoCard
from pypto_serving.backend.cuda.program import CudaProgram
from pypto_serving.backend.native import check_groups
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.kernels.cuda.launch import Call, Launch, recording
from pypto_serving.model.card_weights import CardWeights
from pypto_serving.model.fingerprint import checkpoint_state, program_fingerprint
from pypto_serving.model.registry import CheckpointConfig, read_config


class CudaBackend(Backend):
    """Prepares the program of a card: replica i has card i.

    Kernels are compiled by copies of this process before it opens the card, since a process that has opened one cannot
    be copied.
    """

    def prepare(self, progress: Progress) -> CudaProgram:
        """Compile, load weights, allocate the KV memory and capture the graphs. Raises ModelError or ConfigError."""
        config, card = self.config, self.config.parallel.replica
        state = checkpoint_state(config.model.path)
        checkpoint = read_config(config.model.path)
        check_groups(config, checkpoint.family, checkpoint.model)
        device = self._other_device()
        if device is None:
            compile_ahead(self._launches(checkpoint), card, config.worker.cache_dir, progress)
            device = CudaCard(card)
        try:
            program = self._program(checkpoint, device, progress)
            program.capture(progress)
        except torch.cuda.OutOfMemoryError as error:
            needed = str(error).partition(". GPU")[0]
            raise ConfigError(f"the card has too little memory ({needed}); lower kv-memory") from None
        if checkpoint_state(config.model.path) != state:
            raise ModelError(f"{config.model.path} was changed while it was loaded; start again when it is complete")
        return program

    def _other_device(self) -> Card | None:
        """Return the device that stands for a card in tests, None for a real card."""
        name = self.config.worker.backend_options.get("device")
        return None if name is None else pkgutil.resolve_name(name)()

    def _program(self, checkpoint: CheckpointConfig, device: Card, progress: Progress) -> CudaProgram:
        config, program = self.config, checkpoint.family.program_on_cards
        numerics = (device.name, kernel_identity().hex())
        identity = program_fingerprint(config, progress, checkpoint.architecture, program.name, *numerics)
        with device.torch_device:
            weights = CardWeights(config.model.path, config.model.dtype, progress)
            return CudaProgram(program(checkpoint.model, weights, config), config, identity, device)

    def _launches(self, checkpoint: CheckpointConfig) -> list[Launch]:
        """List the launches of all graphs, with tensors that have no memory."""
        calls: list[Call] = []
        with recording(calls.append):
            for work in self._program(checkpoint, NoCard(), lambda *_: None).works():
                work()
        return [call for call in calls if isinstance(call, Launch)]
