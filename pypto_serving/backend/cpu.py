"""CpuBackend: serve a checkpoint on the CPU, with the CPU kernels or with torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pypto_serving.backend.base import Backend, Fault, Progress, StepBuffers
from pypto_serving.backend.native import NativeLoader, NativeProgram
from pypto_serving.backend.ranks.rank_process import run_rank
from pypto_serving.backend.ranks.serving_host import JoinedHost, await_host
from pypto_serving.backend.ranks.shared_steps import SharedSteps
from pypto_serving.backend.ranks.split_blocks import SplitBlocks
from pypto_serving.backend.ranks.supervisor import RankSupervisor
from pypto_serving.backend.ranks.torch_ranks import TorchRanks
from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine, NativeCollectives, SharedMemory
from pypto_serving.model.fingerprint import file_digests, unchanged
from pypto_serving.types.config import EngineConfig


class CpuBackend(Backend):
    """Prepares the program that `EngineConfig.kernels` names: kernels for an instruction set, or torch.

    If the topology has several ranks, this process leads and owns the others.
    """

    _engine: Engine | None = None
    _supervisor: RankSupervisor | None = None

    _shared: SharedSteps | None = None
    _torch_ranks: TorchRanks | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.parallel.topology.num_ranks == 1:
            return
        if config.worker.kernels == "torch":
            self._torch_ranks = TorchRanks(config)
        else:
            self._shared = SharedSteps(config, config.parallel.topology.ranks[0], SharedMemory.create())

    def allocate(self) -> Sequence[StepBuffers]:
        shared = self._shared or self._torch_ranks
        return super().allocate() if shared is None else shared.buffers

    def pin_main_thread(self) -> None:
        if self._engine is not None:
            self._engine.pin_caller()

    def watch(self, fault: Fault) -> None:
        if self._supervisor is not None:
            self._supervisor.watch(fault)

    def prepare(self, progress: Progress) -> Any:
        """Load weights, allocate the KV arena and return the program. Raises ModelError or ConfigError."""
        with unchanged(self.config.model.path):
            return self._prepare_torch(progress) if self.config.worker.kernels == "torch" else self._prepare(progress)

    def _prepare(self, progress: Progress) -> Any:
        if self._shared is None:
            return self._prepare_native(progress, NativeCollectives())
        self._supervisor = RankSupervisor()
        joined = self._await_host(progress) if self.config.parallel.join_address else None
        ranks, links = self.config.parallel.topology.on_host(0)[1:], defaultdict[int, dict[str, int]](dict)
        for name, fd in joined.links.items() if joined else ():
            links[self.config.parallel.topology.connections[name][0]][name] = fd
        self._supervisor.start(run_rank, self.config, ranks, self._shared.memory.fd, links, self.descendants)
        report = self._supervisor.reporting(progress)
        program = self._prepare_native(report, self._shared.connect(links[0]), links[0].get("blocks"))
        self._supervisor.await_ready(progress)
        return program

    def _await_host(self, progress: Progress) -> JoinedHost:
        assert self._supervisor is not None
        files = file_digests(self.config.model.path, self.config.worker.cache_dir, progress)
        joined = await_host(self.config, files, progress, again=self.respawned)
        self._supervisor.add(joined.name, joined.control)
        return joined

    def _prepare_native(self, progress: Progress, peers: NativeCollectives, blocks: int | None = None) -> NativeProgram:
        loader = NativeLoader(self.config, self.config.parallel.topology.ranks[0])
        self._engine = loader.engine
        identity, model = loader.fingerprint(progress), loader.load(peers, progress)
        memory = None
        if blocks is not None:
            memory = SplitBlocks(
                model.arenas, loader.kv_spans(0), loader.kv_spans(1), blocks, self.config.faults.step_timeout_s
            )
        blame = None if self._supervisor is None else self._supervisor.blame
        return NativeProgram(model, self.config, identity, loader.engine, peers, self._shared, blame, memory)

    def _prepare_torch(self, progress: Progress) -> Any:
        try:
            from pypto_serving.backend import cpu_torch
        except (ImportError, OSError) as error:
            raise ConfigError(f"torch cannot be imported ({error}); install it again") from None
        if self._torch_ranks is not None:
            self._supervisor = self._torch_ranks.supervisor
            self._torch_ranks.start(run_rank, self.config, self.descendants)
        return cpu_torch.prepare(self.config, progress, self._torch_ranks)
