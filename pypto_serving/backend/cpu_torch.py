"""Run models with torch on this machine's cores: for float32, and for models that the kernels do not serve."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pypto_serving.backend.base import Progress, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.memory import HostBlocks
from pypto_serving.model.fingerprint import program_fingerprint
from pypto_serving.model.loader import Weights
from pypto_serving.model.registry import model_family
from pypto_serving.model.step import StepTensors
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import ceil_div

LAYOUT = "block, layer, k or v, head, row"
"""Order of the dimensions of a block's pages; part of the fingerprint."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class TorchProgram:
    """A torch model on this machine's cores. Implements Program."""

    sampler = drafter = None

    def __init__(self, model: Any, config: EngineConfig, fingerprint: bytes) -> None:
        self.model = model
        self.groups, self.num_blocks, self.limits = config.groups, config.num_blocks, config.limits
        self.fingerprint = fingerprint
        self.memory = HostBlocks(tuple(map(_arena, model.pages, self.num_blocks)))
        self._logits: Float32Array | None = None

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> None:
        """Compute a step before returning."""
        with torch.inference_mode():
            tokens = _recurring_rows(len(inputs.token_ids), self.model.rows)
            step = StepTensors(
                token_ids=_int64(inputs.token_ids, tokens),
                positions=_int64(inputs.positions, tokens),
                query_start=_int64(inputs.query_start),
                context_lens=_int64(inputs.context_lens),
                logits_rows=_int64(inputs.logits_rows, _recurring_rows(len(inputs.logits_rows), self.model.rows)),
                slots=tuple(_int64(slots, tokens) for slots in inputs.slot_mapping),
                block_tables=tuple(map(_int64, inputs.block_tables)),
            )
            self._logits = self.model.forward(step)[: len(inputs.logits_rows)].numpy()

    def collect(self) -> StepOutput:
        """Return the logits."""
        return StepOutput(logits=self._logits)


def prepare(config: EngineConfig, architecture: str, model_config: Any, progress: Progress) -> TorchProgram:
    """Load weights, allocate the KV arena and run two warm-up steps. Raises ModelError."""
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    model_class = model_family(architecture).program
    numerics = (f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability(), LAYOUT)
    identity = program_fingerprint(config, progress, architecture, model_class.name, *numerics)
    with torch.inference_mode():
        model = model_class(model_config, Weights(config.model, config.dtype, progress), config)
    _keep_freed_memory()
    program = TorchProgram(model, config, identity)
    steps = _warm_up_steps(config)
    for done, step in enumerate(steps):
        progress("warm-up", done, len(steps))
        program.submit(step)
    progress("warm-up", len(steps), len(steps))
    return program


def _arena(pages: Tensor, num_blocks: int) -> NDArray[np.uint8]:
    """Return a group's pages [num_blocks or more, ...] as bytes, uint8 [num_blocks, block_bytes]."""
    return pages[:num_blocks].view(torch.uint8).numpy().reshape(num_blocks, -1)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory. Otherwise every large activation of every step is mapped and zeroed again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _recurring_rows(n: int, fewest: int) -> int:
    """Round `n` up to one of few row counts, since oneDNN prepares and keeps code for every one that it meets."""
    step = 4 if n <= 4 else 8 if n <= 64 else 32 if n <= 256 else 64
    return max(fewest, ceil_div(n, step) * step) if n else 0


def _int64(array: Int32Array, padded: int = 0) -> Tensor:
    """Convert to int64 and pad with zeros up to length `padded`: tokens of no row, in the null block."""
    return F.pad(torch.from_numpy(array).long(), (0, max(0, padded - len(array))))


def _warm_up_steps(config: EngineConfig) -> list[StepInputs]:
    """Return two steps in null blocks: the longest prompt chunk and the largest batch of decodes.

    They allocate the memory that steps need and prepare oneDNN's code before the first request.
    """
    longest = min(config.max_num_batched_tokens, config.max_model_len)
    most = min(config.max_num_batched_tokens, config.max_num_seqs)
    return [_null_step(config, [longest]), _null_step(config, [1] * most)]


def _null_step(config: EngineConfig, counts: list[int]) -> StepInputs:
    """Return a step with rows of `counts` tokens from position 0 on. Each row samples after its last token."""
    ends = np.cumsum(counts, dtype=np.int32)
    tokens, groups = int(ends[-1]), config.groups
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
