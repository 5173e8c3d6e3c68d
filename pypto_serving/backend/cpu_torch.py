"""Run models with torch on the CPU: for float32, and for models that the kernels do not support."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from pypto_serving.backend.base import Draft, HostBlocks, Progress, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.native import read_served
from pypto_serving.backend.ranks.shared_steps import READY, SharedBuffers
from pypto_serving.backend.ranks.torch_ranks import LeaderSocket, TorchRanks
from pypto_serving.kernels import RanksGone, SharedMemory
from pypto_serving.model.attention import StepTensors
from pypto_serving.model.collectives import TorchCollectives, join_group
from pypto_serving.model.fingerprint import program_fingerprint
from pypto_serving.model.loader import TorchWeights
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import RankStart
from pypto_serving.util import ceil_div

LAYOUT = "block, layer, k or v, head, row"
"""Order of the dimensions of a block's pages; part of the fingerprint."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class TorchProgram:
    """A torch model on the CPU. Implements Program.

    With `ranks`, it leads: the other ranks compute the steps that it publishes there.
    """

    sampler = None

    def __init__(self, model: Any, config: EngineConfig, fingerprint: bytes, ranks: TorchRanks | None = None) -> None:
        self.model = model
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.fingerprint = fingerprint
        self.memory = HostBlocks(tuple(map(_arena, model.pages, self.num_blocks)))
        self._ranks = ranks
        self._logits: Float32Array | None = None
        self.draft: Draft | None = self._draft if config.drafts_in_model else None

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> None:
        """Compute a step before returning. Raises RankError if another rank has ended."""
        if self._ranks is None:
            self._logits = compute(self.model, inputs)
            return
        try:
            if len(inputs.token_ids):
                self._ranks.publish(inputs)
            self._logits = compute(self.model, inputs)
        except RanksGone:
            self._ranks.supervisor.blame()

    def collect(self) -> StepOutput:
        """Return the logits."""
        return StepOutput(logits=self._logits)

    def _draft(self, inputs: StepInputs) -> Float32Array:
        """Implement Draft."""
        return compute(self.model, inputs, self.model.draft)


def compute(model: Any, inputs: StepInputs, forward: Callable[[StepTensors], Tensor] | None = None) -> Float32Array:
    """Compute a step with `forward`, by default the model's, and return its logits."""
    with torch.inference_mode():
        tokens = _recurring_rows(len(inputs.token_ids), model.rows)
        step = StepTensors(
            token_ids=_int64(inputs.token_ids, tokens),
            positions=_int64(inputs.positions, tokens),
            query_start=_int64(inputs.query_start),
            context_lens=_int64(inputs.context_lens),
            logits_rows=_int64(inputs.logits_rows, _recurring_rows(len(inputs.logits_rows), model.rows)),
            slots=tuple(_int64(slots, tokens) for slots in inputs.slot_mapping),
            block_tables=tuple(map(_int64, inputs.block_tables)),
        )
        found: Tensor = (forward or model.forward)(step)
        logits: Float32Array = found[: len(inputs.logits_rows)].numpy()
        return logits


def prepare(config: EngineConfig, progress: Progress, ranks: TorchRanks | None = None) -> TorchProgram:
    """Load weights, allocate the KV arena and run two warm-up steps. Raises ModelError, or RankError."""
    loader = TorchLoader(config, config.parallel.topology.ranks[0])
    identity = loader.fingerprint(progress)
    if ranks is None:
        return TorchProgram(loader.load(TorchCollectives(), progress), config, identity)

    def connect() -> ProcessGroup:
        ranks.gather(progress)
        return loader.join_group(ranks.store)

    try:
        comm = TorchCollectives(loader.rank, connect, ranks.memory.zeros)
        return TorchProgram(loader.load(comm, ranks.supervisor.reporting(progress)), config, identity, ranks)
    except RanksGone:
        ranks.supervisor.blame()


def run_rank(start: RankStart, progress: Progress) -> None:
    """Compute a rank's part of the steps that the leader publishes, until the leader ends. Raises ModelError."""
    loader = TorchLoader(start.config, start.config.parallel.topology.ranks[start.rank])
    shared, leader = SharedBuffers(start.config, SharedMemory(start.memory)), LeaderSocket(start.links["steps"])

    def connect() -> ProcessGroup:
        progress(READY, 1, 1)
        leader.await_others()
        return loader.join_group(start.links["store"])

    try:
        model = loader.load(TorchCollectives(loader.rank, connect, shared.memory.zeros), progress)
        for inputs in leader.steps(shared):
            compute(model, inputs)
    except RanksGone:
        threading.Event().wait()  # the leader reports the rank that has ended, and ends all


class TorchLoader:
    """Loads a rank's part of a model. Raises ConfigError if the configuration does not match the checkpoint."""

    def __init__(self, config: EngineConfig, rank: Rank) -> None:
        self.config, self.rank = config, rank
        self._checkpoint = read_served(config)
        self._program = self._checkpoint.family.program

    def fingerprint(self, progress: Progress) -> bytes:
        """Hash everything except tokens that the content of KV blocks depends on.

        This includes the topology, since the sizes of matrix products affect rounding.
        """
        topology = self.config.parallel.topology
        sizes = (f"{topology.tensor} x {topology.expert} ranks",) if topology.num_ranks > 1 else ()
        numerics = (f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability(), LAYOUT, *sizes)
        return program_fingerprint(self.config, progress, self._checkpoint.architecture, self._program.name, *numerics)

    def load(self, comm: TorchCollectives, progress: Progress) -> Any:
        """Load the weights, and run the warm-up steps with all ranks."""
        self._take_cpus()
        with torch.inference_mode():
            weights = TorchWeights(self.config.model.path, self.config.model.dtype, progress)
            model = self._program(self._checkpoint.model, weights, self.config, comm)
        _keep_freed_memory()
        steps = _warm_up_steps(self.config)
        for done, step in enumerate(steps):
            progress("warm-up", done, len(steps))
            compute(model, step)
        progress("warm-up", len(steps), len(steps))
        return model

    def join_group(self, store: int) -> ProcessGroup:
        """Join the group of all ranks. A rank that makes others wait longer than the limit of a step counts as lost."""
        return join_group(self.rank, store, self.config.faults.step_timeout_s)

    def _take_cpus(self) -> None:
        """Run on the CPUs of the rank's placement. All ranks have the same number of threads.

        Ranks must compute equal bits where they repeat work, such as routing, and products depend on this number.
        """
        if cpus := self.config.parallel.placement(self.rank.index).cpus:
            os.sched_setaffinity(0, cpus)
        threads = min(
            self.config.parallel.placement(rank.index).num_threads for rank in self.config.parallel.topology.ranks
        )
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def _arena(pages: Tensor, num_blocks: int) -> NDArray[np.uint8]:
    """Return a group's pages [num_blocks or more, ...] as bytes, uint8 [num_blocks, block_bytes]."""
    return pages[:num_blocks].view(torch.uint8).numpy().reshape(num_blocks, -1)


def _keep_freed_memory() -> None:
    """Make glibc reuse freed memory. Otherwise every large activation of every step is mapped and zeroed again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _recurring_rows(n: int, fewest: int) -> int:
    """Round `n` up to one of few row counts, since oneDNN generates and keeps code for each count that it sees."""
    step = 4 if n <= 4 else 8 if n <= 64 else 32 if n <= 256 else 64
    return max(fewest, ceil_div(n, step) * step) if n else 0


def _int64(array: Int32Array, padded: int = 0) -> Tensor:
    """Convert to int64 and pad with zeros up to length `padded`. Padding tokens belong to no row; slot 0 is null."""
    return F.pad(torch.from_numpy(array).long(), (0, max(0, padded - len(array))))


def _warm_up_steps(config: EngineConfig) -> list[StepInputs]:
    """Return two steps in null blocks: the longest prompt chunk and the largest batch of decodes.

    They make torch allocate the memory of steps, and oneDNN generate code, before the first request.
    """
    longest = min(config.limits.max_num_batched_tokens, config.limits.max_model_len)
    most = min(config.limits.max_num_batched_tokens, config.limits.max_num_seqs)
    return [_null_step(config, [longest]), _null_step(config, [1] * most)]


def _null_step(config: EngineConfig, counts: list[int]) -> StepInputs:
    """Return a step with rows of `counts` tokens from position 0 on. Each row samples after its last token."""
    ends = np.cumsum(counts, dtype=np.int32)
    tokens, groups = int(ends[-1]), config.cache.groups
    return StepInputs(
        token_ids=np.zeros(tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        query_start=np.concatenate([np.zeros(1, dtype=np.int32), ends]),
        context_lens=np.array(counts, dtype=np.int32),
        logits_rows=ends - 1,
        slot_mapping=tuple(np.zeros(tokens, dtype=np.int32) for _ in groups),
        block_tables=tuple(
            np.zeros((len(counts), ceil_div(max(counts), group.block_size)), dtype=np.int32) for group in groups
        ),
        fresh_blocks=tuple(np.empty(0, dtype=np.int32) for _ in groups),
    )
