"""CpuBackend: serve a checkpoint on this machine's cores, with the CPU kernels or with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pypto_serving.backend.base import Backend, Fault, Progress, StepBuffers
from pypto_serving.backend.native import NativeLoader, NativeProgram, check_groups
from pypto_serving.backend.ranks import Followers, Shared
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.kernels import Engine, Peers, SharedMemory
from pypto_serving.model.fingerprint import checkpoint_state
from pypto_serving.model.registry import load_config, model_family
from pypto_serving.types.config import EngineConfig


class CpuBackend(Backend):
    """Prepares the program that `EngineConfig.kernels` names: kernels for an instruction set, or torch.

    Where the topology has several ranks, this process is the leader, and owns the others.
    """

    _engine: Engine | None = None
    _followers: Followers | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        ranks = config.topology.ranks
        self._shared = Shared(config, ranks[0], SharedMemory.create()) if len(ranks) > 1 else None

    def allocate(self) -> Sequence[StepBuffers]:
        return super().allocate() if self._shared is None else self._shared.buffers

    def pin_main_thread(self) -> None:
        if self._engine is not None:
            self._engine.pin_caller()

    def watch(self, fault: Fault) -> None:
        if self._followers is not None:
            self._followers.watch(fault)

    def prepare(self, progress: Progress) -> Any:
        """Load weights, allocate the KV arena and return the program. Raises ModelError or ConfigError."""
        state = checkpoint_state(self.config.model)
        program = self._prepare(progress)
        if checkpoint_state(self.config.model) != state:
            raise ModelError(f"{self.config.model} was changed while it was loaded; start again when it is complete")
        return program

    def _prepare(self, progress: Progress) -> Any:
        if self.config.kernels == "torch":
            return self._prepare_torch(progress)
        if self._shared is None:
            return self._prepare_native(progress, Peers())
        self._followers = Followers(self.config, self._shared.memory, self.descendants)
        program = self._prepare_native(self._followers.reporting(progress), self._shared.peers)
        self._followers.await_ready(progress)
        return program

    def _prepare_native(self, progress: Progress, peers: Peers) -> NativeProgram:
        loader = NativeLoader(self.config, self.config.topology.ranks[0])
        self._engine = loader.engine
        identity = loader.fingerprint(progress)
        return NativeProgram(loader.load(peers, progress), self.config, identity, loader.engine, self._shared)

    def _prepare_torch(self, progress: Progress) -> Any:
        if self._shared is not None:
            raise ConfigError("torch computes on one rank; choose other kernels")
        architecture, model_config = load_config(self.config.model)
        check_groups(self.config, model_family(architecture), model_config)
        try:
            from pypto_serving.backend import cpu_torch
        except (ImportError, OSError) as error:
            raise ConfigError(f"torch cannot be imported ({error}); install it again") from None
        return cpu_torch.prepare(self.config, architecture, model_config, progress)
