"""CpuBackend: serve a checkpoint on this machine's cores, with the CPU kernels or with torch."""

from __future__ import annotations

import os
from typing import Any

from pypto_serving.backend.base import Backend, Progress, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.memory import HostBlocks
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.kernels import Engine, NativeSampler
from pypto_serving.model.fingerprint import checkpoint_state, program_fingerprint
from pypto_serving.model.packed import PackedWeights
from pypto_serving.model.packed_file import PackedFile, packed_key
from pypto_serving.model.registry import load_config, model_family
from pypto_serving.types.config import EngineConfig


class NativeProgram:
    """A model on the CPU kernels. Owns its arenas and weights. Implements Program."""

    drafter = None

    def __init__(self, model: Any, config: EngineConfig, fingerprint: bytes, engine: Engine) -> None:
        self.model, self.sampler = model, NativeSampler(engine)
        self.groups, self.num_blocks, self.limits = config.groups, config.num_blocks, config.limits
        self.fingerprint = fingerprint
        self.memory = HostBlocks(model.arenas)
        self._num_logits = 0

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> None:
        """Compute a step before returning, since no other work could overlap on the cores."""
        self.model.step.replay(
            inputs.token_ids,
            inputs.positions,
            inputs.query_start,
            inputs.context_lens,
            inputs.logits_rows,
            inputs.slot_mapping,
            inputs.block_tables,
        )
        self._num_logits = len(inputs.logits_rows)

    def collect(self) -> StepOutput:
        """Return the logits as a view that the next step overwrites."""
        return StepOutput(logits=self.model.logits[: self._num_logits])


class CpuBackend(Backend):
    """Prepares the program that `EngineConfig.kernels` names: kernels for an instruction set, or torch."""

    _engine: Engine | None = None

    def pin_main_thread(self) -> None:
        if self._engine is not None:
            self._engine.pin_caller()

    def prepare(self, progress: Progress) -> Any:
        """Load weights, allocate the KV arena and return the program. Raises ModelError or ConfigError."""
        state = checkpoint_state(self.config.model)
        program = self._prepare(progress)
        if checkpoint_state(self.config.model) != state:
            raise ModelError(f"{self.config.model} was changed while it was loaded; start again when it is complete")
        return program

    def _prepare(self, progress: Progress) -> Any:
        config = self.config
        architecture, model_config = load_config(config.model)
        family = model_family(architecture)
        dtype = "int8" if config.int8_kv else config.dtype
        if family.kv_groups(model_config, dtype, config.groups[0].block_size) != config.groups:
            raise ConfigError(f"the KV groups of {config.model} in {dtype} are not the configured ones")
        if config.kernels == "torch":
            try:
                from pypto_serving.backend import cpu_torch
            except (ImportError, OSError) as error:
                raise ConfigError(f"torch cannot be imported ({error}); install it again") from None
            return cpu_torch.prepare(config, architecture, model_config, progress)
        engine = self._engine = Engine(config.kernels, config.num_threads or len(os.sched_getaffinity(0)))
        model_class = family.native_program
        name, numerics = model_class.name(model_config, config), (engine.instruction_set, model_class.layout)
        identity = program_fingerprint(config, progress, architecture, name, *numerics)
        file = None
        if config.packed_cache:
            tensors = family.inventory(model_config).expected().items()
            shapes = (f"{name} {wanted}" for name, wanted in tensors)
            key = packed_key(config.model, architecture, name, *shapes)
            file = PackedFile(config.packed_cache, key, engine)
        model = model_class(model_config, PackedWeights(config.model, engine, progress, file), engine, config)
        if file is not None:
            file.save()
        return NativeProgram(model, config, identity, engine)
