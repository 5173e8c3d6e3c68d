"""The frozen configuration of a replica and of its HTTP server, as `setup` decides it."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.step import BackendLimits, BackendTraits
from pypto_serving.types.tier import StorePolicy, TierConfig


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a replica's parts count as dead, in seconds, and how often they are started again.

    `heartbeat_s`: how often idle processes speak; one silent for ten beats is dead. `step_timeout_s`: the
    longest step, and the longest time without a completed step while work waits. `load_timeout_s`: the longest
    time without progress while loading. A worker is started again at most `max_respawns` times without a
    completed step in between; waits between starts double from `respawn_delay_s`.
    """

    heartbeat_s: float = 1.0
    step_timeout_s: float = 120.0
    load_timeout_s: float = 300.0
    max_respawns: int = 6
    respawn_delay_s: float = 0.1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the engine core and its worker need. Sizes in bytes, lengths in tokens.

    `num_blocks[g]` counts the null block 0. `kernels` names the instruction set of the CPU kernels, or torch;
    `packed_cache` is the folder that keeps the weights packed for them, or empty. `tiers` keep KV blocks below the
    device; `kv_store` says when blocks go there. KV events go to the ZeroMQ endpoints `kv_events` and
    `kv_events_replay`, or nowhere where those are empty.
    `traits` is what programs of the backend can do; `num_drafts` the draft tokens of a row in a step.
    `backend_options` are read by the backend alone.
    """

    model: str
    backend: str
    dtype: str
    vocab_size: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_queued_requests: int = 4096
    depth: int = 1
    traits: BackendTraits = BackendTraits()
    num_drafts: int = 0
    seed: int = 0
    num_threads: int = 0
    kernels: str = "torch"
    packed_cache: str = ""
    tiers: tuple[TierConfig, ...] = ()
    kv_store: StorePolicy = "through"
    kv_events: str = ""
    kv_events_replay: str = ""
    log_level: str = "info"
    faults: FaultConfig = FaultConfig()
    worker_module: str = "pypto_serving.worker"
    backend_options: dict[str, Any] = {}

    @property
    def limits(self) -> BackendLimits:
        """What a program must be able to do."""
        return BackendLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            depth=self.depth,
            traits=self.traits,
        )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process needs beside the engine. Port 0: the system chooses; no `api_key`: open."""

    served_model_names: tuple[str, ...]
    host: str
    port: int
    api_key: str | None
    chat_template: str | None
    drain_timeout_s: float
    log_requests: bool
