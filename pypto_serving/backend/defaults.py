"""List the backends, their modules and defaults. Imports no runtime, so that `setup` may import it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pypto_serving.types.config import MAX_DRAFTS, default_of
from pypto_serving.types.step import BackendLimits, BackendTraits

CARD_CAPABILITIES = ((8, 0), (9, 0))
"""Compute capabilities of the cards that the kernels are compiled for in tests."""


class BackendDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of one backend, for options that the user does not set.

    - target: its class, as `module:class`.
    - depth: steps in flight; traits: abilities of its programs.
    - cpu_kernels: it uses the CPU kernels for models that they support.
    - in_host_memory: its device memory is host memory.
    - simulated: it has no weights and takes no memory.
    - platforms: platforms that the user may choose from, first a device, last its simulator.
    - own_memory: the device has memory of its own, whose size only its runtime knows.
    - longest: limit of a sequence's tokens, 0 for none.
    - splits: dimensions of a Topology in which its programs can have ranks, with the CPU kernels if it uses them.
    - devices: ranks are devices that one process drives, not processes.
    - cards: each replica has an NVIDIA card of its own.
    - kv_share: share for KV of the memory that weights and workspace leave.
    """

    target: str
    max_num_seqs: int = default_of(BackendLimits, "max_num_seqs")
    max_num_batched_tokens: int = default_of(BackendLimits, "max_num_batched_tokens")
    depth: int = default_of(BackendLimits, "depth")
    traits: BackendTraits = BackendTraits()
    cpu_kernels: bool = False
    in_host_memory: bool = False
    simulated: bool = False
    platforms: tuple[str, ...] = ()
    own_memory: bool = False
    longest: int = 0
    splits: tuple[str, ...] = ()
    devices: bool = False
    cards: bool = False
    kv_share: float = 0.5

    def in_stages(self, stages: int) -> BackendDefaults:
        """Return the defaults for a pipeline, in which each stage computes another step."""
        traits = msgspec.structs.replace(self.traits, stages=stages)
        return msgspec.structs.replace(self, depth=max(self.depth, stages), traits=traits)


BACKEND_DEFAULTS: Mapping[str, BackendDefaults] = {
    "cpu": BackendDefaults(
        target="pypto_serving.backend.cpu:CpuBackend",
        depth=2,
        traits=BackendTraits(max_drafts=MAX_DRAFTS),
        cpu_kernels=True,
        in_host_memory=True,
        splits=("tensor", "pipeline", "expert"),
    ),
    "npu": BackendDefaults(
        target="pypto_serving.backend.npu.backend:NpuBackend",
        max_num_seqs=16,
        depth=2,
        traits=BackendTraits(mixed_steps=False, padded_rows=(16,), page_tokens=128, prompt_logprobs=False),
        platforms=("a2a3", "a5", "a5sim", "a2a3sim"),
        longest=4096,
        splits=("tensor",),
        devices=True,
    ),
    "cuda": BackendDefaults(
        target="pypto_serving.backend.cuda.backend:CudaBackend",
        max_num_batched_tokens=2048,
        depth=2,
        traits=BackendTraits(
            mixed_steps=False,
            padded_rows=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
            page_tokens=64,
            samples_on_device=True,
            prompt_logprobs=False,
        ),
        cards=True,
        kv_share=0.9,
    ),
    "null": BackendDefaults(
        target="pypto_serving.backend.null.program:NullBackend",
        traits=BackendTraits(samples_on_device=True),
        simulated=True,
    ),
}
"""Backends by their name for `--backend`; the first is the default."""
