"""The CPU backend: readable torch programs on this machine's cores."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pypto_serving.backend.base import Backend, Int32Array, Progress, StepInputs, StepOutput
from pypto_serving.config import EngineConfig
from pypto_serving.errors import ConfigError
from pypto_serving.host import read_host_facts
from pypto_serving.model.loader import Weights, fingerprint
from pypto_serving.model.registry import load_config, model_family
from pypto_serving.model.step import StepTensors
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.util import hash128

LAYOUT = "block, layer, k or v, head, row"
"""Order of the dimensions of a block's pages; part of the fingerprint."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class CpuProgram:
    """A model on this machine's cores. Implements Program."""

    def __init__(self, model: Any, config: EngineConfig, fingerprint: bytes) -> None:
        self.model = model
        self.groups, self.num_blocks, self.limits = config.groups, config.num_blocks, config.limits
        self.fingerprint = fingerprint

    def run(self, inputs: StepInputs) -> StepOutput:
        """Compute one step: write the K/V of its tokens, then return float32 logits of `inputs.logits_rows`."""
        with torch.inference_mode():
            step = StepTensors(
                token_ids=_int64(inputs.token_ids),
                positions=_int64(inputs.positions),
                query_start=_int64(inputs.query_start),
                context_lens=_int64(inputs.context_lens),
                logits_rows=_int64(inputs.logits_rows),
                slots=tuple(map(_int64, inputs.slot_mapping)),
                block_tables=tuple(map(_int64, inputs.block_tables)),
            )
            return StepOutput(logits=self.model.forward(step).numpy())


class CpuBackend(Backend):
    """Serves a checkpoint with the torch program of its family."""

    def prepare(self, progress: Progress) -> Any:
        """Load weights, allocate the KV arena and run one tiny step. Raises ModelError or ConfigError."""
        config = self.config
        _keep_freed_memory()
        torch.set_num_threads(config.num_threads or read_host_facts().num_cpus)
        architecture, model_config = load_config(config.model)
        groups = model_config.kv_groups(config.dtype, config.groups[0].block_size if config.groups else 16)
        if groups != config.groups:
            raise ConfigError(f"the KV groups of {config.model} in {config.dtype} are not the configured ones")
        model_class = model_family(architecture).program
        with torch.inference_mode():
            model = model_class(model_config, Weights(config.model, config.dtype, progress), config)
        program = CpuProgram(model, config, _fingerprint(config, architecture, model_class.name))
        progress("warm-up", 0, 1)
        program.run(_null_step(groups))
        progress("warm-up", 1, 1)
        return program


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory, or every large activation of every step is mapped and zeroed anew."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _int64(array: Int32Array) -> Tensor:
    return torch.from_numpy(array).long()


def _fingerprint(config: EngineConfig, architecture: str, program: str) -> bytes:
    """16 bytes naming everything that the content of a KV block depends on, besides its tokens."""
    numerics = (program, f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability())
    blocks = tuple(f"{group.name} {group.block_size}" for group in config.groups)
    rope = f"max_model_len {config.max_model_len}"
    words = (architecture, config.dtype, LAYOUT, rope, *blocks, *numerics)
    return hash128(fingerprint(config.model), *(word.encode() for word in words))


def _null_step(groups: tuple[KVCacheGroupSpec, ...]) -> StepInputs:
    """A row of one token and a row of two, all in null blocks."""

    def ints(*values: int) -> Int32Array:
        return np.array(values, dtype=np.int32)

    return StepInputs(
        token_ids=ints(0, 0, 0),
        positions=ints(0, 0, 0),
        query_start=ints(0, 1, 3),
        context_lens=ints(1, 1),
        logits_rows=ints(0, 2),
        slot_mapping=tuple(ints(0, 0, 0) for _ in groups),
        block_tables=tuple(np.zeros((2, 1), dtype=np.int32) for _ in groups),
        fresh_blocks=tuple(ints() for _ in groups),
    )
