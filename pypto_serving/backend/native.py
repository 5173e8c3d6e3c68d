"""NativeProgram: a model on the CPU kernels, computed by one process or by several ranks together."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from pypto_serving.backend.base import Draft, HostBlocks, Progress, SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.ranks.shared_steps import SharedSteps, step_arrays
from pypto_serving.backend.ranks.split_blocks import merged
from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine, NativeCollectives, NativeSampler, RanksGone, Recording
from pypto_serving.model.fingerprint import overrides_part, program_fingerprint
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.packed_weights_file import PackedFile, packed_key
from pypto_serving.model.registry import CheckpointConfig, read_config
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.arrays import Float32Array
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans


class NativeLoader:
    """Owns the engine of one rank, and loads the rank's part of a model.

    Raises ConfigError if the configuration does not match the checkpoint, or if the kernels cannot run here.
    """

    def __init__(self, config: EngineConfig, rank: Rank) -> None:
        self.config, self.rank = config, rank
        self._checkpoint = read_served(config)
        self._model, self._program = self._checkpoint.model, self._checkpoint.family.native_program
        place = config.parallel.placement(rank.index)
        cpus = set(place.cpus) or os.sched_getaffinity(0)
        self.engine = Engine(config.worker.kernels, place.num_threads or len(cpus), cpus)

    def fingerprint(self, progress: Progress) -> bytes:
        """Hash everything except tokens that the content of KV blocks depends on. The number of ranks is not hashed."""
        numerics = (self.engine.instruction_set, self._program.layout)
        return program_fingerprint(self.config, progress, self._checkpoint.architecture, self._name, *numerics)

    @property
    def _name(self) -> str:
        return str(self._program.name(self._model, self.config))

    def load(self, peers: NativeCollectives, progress: Progress) -> Any:
        """Load the weights and record the step. Raises ModelError or ConfigError."""
        file = self._packed_file() if self.config.worker.packed_cache else None
        weights = PackedWeights(self.config.model.path, self.engine, progress, file)
        model = self._program(self._model, weights, self.engine, self.config, self.rank, peers)
        if file is not None:
            file.save()
        return model

    def kv_spans(self, host: int) -> list[Spans]:
        """Return, per KV group, the bytes of a block that the ranks of a host read and write."""
        ranks = self.rank.topology.on_host(host)
        each = [self._program.kv_spans(self._model, self.config, rank) for rank in ranks]
        return [merged(spans) for spans in zip(*each, strict=True)]

    def _packed_file(self) -> PackedFile:
        tensors = self._checkpoint.family.inventory(self._model).expected().items()
        shapes = (f"{name} {wanted}" for name, wanted in tensors)
        topology = self.rank.topology
        sizes = f"{topology.tensor} x {topology.pipeline} x {topology.expert} x {topology.data}"
        part: tuple[str, ...] = (f"rank {self.rank.index} of {sizes}",) if topology.num_ranks > 1 else ()
        part += overrides_part(self.config)
        key = packed_key(self.config.model.path, self._checkpoint.architecture, self._name, *part, *shapes)
        return PackedFile(self.config.worker.packed_cache, key, self.engine)


def read_served(config: EngineConfig) -> CheckpointConfig:
    """Read the configuration of the checkpoint, with its draft layers if they are served.

    Raises ModelError, or ConfigError if the model's KV groups differ from the configured ones.
    """
    found = read_config(config.model.path, config.model.hf_overrides)
    model = found.served_model(config.drafts_in_model)
    dtype = "int8" if config.cache.int8_kv else config.model.dtype
    if found.family.kv_groups(model, dtype, config.cache.groups[0].block_size) != config.cache.groups:
        raise ConfigError(f"the KV groups of {config.model.path} in {dtype} are not the configured ones")
    return replace(found, model=model)


class _Step(NamedTuple):
    """Step `number`, counted from 1, in the buffers of `slot`."""

    number: int
    slot: int
    num_logits: int


class NativeProgram:
    """A model on the CPU kernels. Owns its arenas and weights. Implements Program.

    With `shared`, it leads: other ranks replay the steps that it publishes there. When a rank has ended, `blame`
    raises that rank's error. `memory` gives access to the blocks in the arenas.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        fingerprint: bytes,
        engine: Engine,
        peers: NativeCollectives,
        shared: SharedSteps | None = None,
        blame: Callable[[], NoReturn] | None = None,
        memory: HostBlocks | None = None,
    ) -> None:
        self.model, self.sampler = model, NativeSampler(engine)
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.fingerprint = fingerprint
        self.memory = memory or HostBlocks(model.arenas)
        self._shared, self._blame, self._peers = shared, blame, peers
        self.draft: Draft | None = self._draft if config.drafts_in_model else None
        self._held: deque[_Step | None] = deque()
        self._begun = 0

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None = None) -> None:
        """Compute a step, or its first stage, before returning, since the kernels use all cores.

        Raises RankError if another rank has ended.
        """
        self._held.append(self._replay(self.model.step, inputs) if len(inputs.token_ids) else None)

    def _draft(self, inputs: StepInputs) -> Float32Array:
        """Implement Draft; in a pipeline, wait for the steps in flight. Raises RankError if another rank has ended."""
        return self._logits(self._replay(self.model.draft_step, inputs))

    def _replay(self, step: Recording, inputs: StepInputs) -> _Step:
        """Compute a step on all ranks; in a pipeline, return before later stages have finished."""
        try:
            slot = 0 if self._shared is None else self._shared.publish(inputs)
            step.replay(*step_arrays(inputs), slot=slot)
        except RanksGone:
            self._give_up()
        self._begun += 1
        return _Step(self._begun, slot, len(inputs.logits_rows))

    def collect(self) -> StepOutput:
        """Return the logits as a view that the next step in the same buffers overwrites.

        Raises RankError if another rank has ended.
        """
        step = self._held.popleft()
        return StepOutput(logits=self.model.logits[:0] if step is None else self._logits(step))

    def _logits(self, step: _Step) -> Float32Array:
        """Wait for a step, and return its logits. Raises RankError if another rank has ended."""
        try:
            return self._peers.await_logits(self.model.logits, step.slot, step.number)[: step.num_logits]
        except RanksGone:
            self._give_up()

    def _give_up(self) -> NoReturn:
        assert self._blame is not None
        self._blame()
