"""Whole steps of a checkpoint, and where their time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from roofline_kernels import Bench, Result, Rounds, bfloat16, fill, replay
from roofline_work import BLOCK, Batch, Operation, Work, operations

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.kernels import Recording
from pypto_serving.model.registry import Serving, load_spec, read_config
from pypto_serving.setup.host import read_host_facts
from pypto_serving.types.config import CacheConfig, EngineConfig, Head, ModelConfig, ParallelConfig, WorkerConfig
from pypto_serving.types.step import BackendLimits

STEP, REST = "step", "rest"
"""Names of the row of a whole step, and of what the kernels do not account for."""


def batches(quick: bool) -> list[Batch]:
    """Decode at several batch sizes and contexts, and a prefill."""
    if quick:
        return [Batch.decode(1, 128), Batch.decode(8, 128), Batch.prefill(128, 128)]
    decode = (Batch.decode(rows, context) for context in (128, 2048) for rows in (1, 8, 32))
    return [*decode, Batch.decode(16, 1104, 1024), Batch.prefill(512, 512)]


class Steps:
    """Owns a loaded model whose cache is full of random numbers."""

    def __init__(self, model: Path, kernels: str, threads: int, wanted: list[Batch], head: Head = "auto") -> None:
        """Keeps in `batches` what there is memory for."""
        spec = load_spec(model, Serving("bfloat16", BLOCK))
        block_bytes = sum(group.block_bytes for group in spec.kv_groups)
        room = (read_host_facts().available_bytes - 1.1 * spec.packed_bytes) * 0.9
        self.batches = [batch for batch in wanted if batch.num_blocks * block_bytes < room]
        if not self.batches:
            raise SystemExit(
                f"{model}: its steps need {block_bytes * wanted[0].num_blocks:,} bytes more than there are"
            )
        self.config = EngineConfig(
            model=ModelConfig(path=str(model), dtype="bfloat16", vocab_size=spec.vocab_size, head=head),
            worker=WorkerConfig(backend="cpu", kernels=kernels),
            cache=CacheConfig(groups=spec.kv_groups, num_blocks=(max(batch.num_blocks for batch in self.batches),)),
            limits=BackendLimits(
                max_model_len=max(max(batch.contexts) for batch in self.batches),
                max_num_seqs=max(len(batch.queries) for batch in self.batches),
                max_num_batched_tokens=max(batch.tokens for batch in self.batches),
            ),
            parallel=ParallelConfig(num_threads=threads),
        )
        self._model = read_config(str(model)).model
        self._program: Any = CpuBackend(self.config).prepare(lambda *_: None)
        self.recording: Recording = self._program.model.step
        pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
        fill(self._program.model.pages.reshape(-1), bfloat16(pool))

    def measure(self, batch: Batch, bench: Bench) -> list[Result]:
        """Rows for each kind of operation, for what is left, and for the whole step."""
        planned = list(operations(self._model, batch, self.config.model.head))
        assert [operation.name for operation in planned] == self.recording.names, "the model records other operations"
        inputs = batch.inputs(bench.rng, self._model.vocab_size)
        seconds: list[Any] = []
        whole: list[float] = []

        def once() -> None:
            began = time.perf_counter()
            seconds.append(replay(self.recording, inputs))
            whole.append(time.perf_counter() - began)

        limits = bench.rounds(once)
        rounds = Rounds(np.array(seconds[1:]), *limits)
        return list(_by_label(batch.shape, planned, rounds, np.array(whole[1:])))


def _by_label(shape: str, planned: list[Operation], rounds: Rounds, totals: Any) -> Iterator[Result]:
    """The best times are those of the fastest step, so that they add up to it."""
    fastest = int(np.argmin(totals))

    def result(name: str, works: list[Work], times: Any) -> Result:
        return replace(Result.of(name, shape, works, times, rounds), best=float(times[fastest]))

    seconds = rounds.seconds
    for label in dict.fromkeys(operation.label for operation in planned):
        chosen = [i for i, operation in enumerate(planned) if operation.label == label]
        yield result(label, [planned[i].work for i in chosen], seconds[:, chosen].sum(axis=1))
    yield result(REST, [], totals - seconds.sum(axis=1))
    yield result(STEP, [operation.work for operation in planned], totals)
