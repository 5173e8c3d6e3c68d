"""All ranks of a torch program in one process, a thread each, behind the interface of one program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pypto_serving.backend.base import StepInputs, StepOutput
from pypto_serving.backend.cpu_torch import TorchProgram, compute
from pypto_serving.kernels import SharedMemory
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.registry import read_config
from pypto_serving.parallel.topology import Rank, Topology
from tests.configs import change_config
from tests.model.cpu_backend import config_for
from tests.model.sequences import Array, Sequences

T = TypeVar("T")
PATIENCE = timedelta(seconds=60)
PROMPTS = (np.arange(3, 75) % 131, np.arange(70, 5, -1))
Work = list[list[tuple[int, int]]]
CHUNKS: Work = [[(0, 37)], [(0, 30), (1, 1)], [(1, 40), (0, 1)], [(0, 1), (1, 1)]]
"""Steps: (prompt, tokens) of each row."""
AT_ONCE: Work = [[(1, 42), (0, 69)]]


class CountedWeights(TorchWeights):
    """Counts the bytes that a program asks for."""

    num_bytes = 0

    def read(self, *names: str, **options: Any) -> Tensor:
        return self._counted(super().read(*names, **options))

    def lend(self, *names: str, **options: Any) -> Tensor:
        return self._counted(super().lend(*names, **options))

    def _counted(self, tensor: Tensor) -> Tensor:
        self.num_bytes += tensor.nbytes
        return tensor


class TorchRankedProgram:
    """Owns the ranks of a checkpoint in float32: `models`, and the bytes of their `weights`, in order."""

    def __init__(self, path: Path, topology: Topology) -> None:
        config = config_for(path)
        self.config = config = change_config(config, num_blocks=(40,) * len(config.cache.groups))
        checkpoint = read_config(path)
        program, model = checkpoint.family.program, checkpoint.model
        memory, store = SharedMemory.create(), dist.HashStore()  # type: ignore[attr-defined]
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")  # type: ignore[attr-defined]
        self._threads = ThreadPoolExecutor(topology.num_ranks)

        def load(rank: Rank) -> Any:
            def connect() -> Any:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices, options._timeout = [device], PATIENCE
                return dist.ProcessGroupGloo(store, rank.index, topology.num_ranks, options)  # type: ignore[attr-defined]

            torch.set_num_threads(1)
            alone = topology.num_ranks == 1
            comm = TorchCollectives() if alone else TorchCollectives(rank, connect, SharedMemory(memory.fd).zeros)
            weights = CountedWeights(path, "float32", lambda *_: None)
            with torch.inference_mode():
                return program(model, weights, config, comm), weights.num_bytes

        self.models, self.weights = zip(*self._on_all(load, topology.ranks), strict=True)
        leader = TorchProgram(self.models[0], config, b"")
        self.groups, self.num_blocks, self.memory = leader.groups, leader.num_blocks, leader.memory

    def _on_all(self, function: Callable[[Any], T], each: Any) -> list[T]:
        return [done.result() for done in [self._threads.submit(function, one) for one in each]]

    def submit(self, inputs: StepInputs, _sampling: Any = None) -> None:
        """Compute a step on all ranks at once."""
        self._logits = self._on_all(lambda model: compute(model, inputs), self.models)

    def collect(self) -> StepOutput:
        for other in self._logits[1:]:
            assert np.array_equal(other, self._logits[0])
        return StepOutput(logits=self._logits[0])


def logits_of(program: TorchRankedProgram, work: Work) -> Array:
    """Logits of both prompts at every position that these steps compute."""
    sequences = Sequences(program)
    both = [sequences.add(prompt) for prompt in PROMPTS]
    for step in work:
        sequences.step([(both[prompt], count) for prompt, count in step], everywhere=True)
    return np.stack([row for sequence in both for _, row in sorted(sequence.logits.items())])
