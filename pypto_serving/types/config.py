"""The frozen configuration of a replica and of its HTTP server, as `setup` decides it.

A default that depends on neither model nor machine is the default of its field here, and nowhere else.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.logs import LogFormat
from pypto_serving.parallel.placement import Placement
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.drafts import NgramConfig
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks, publication_lag, resume_step
from pypto_serving.types.step import BackendLimits, BackendTraits
from pypto_serving.types.tier import StorePolicy, TierConfig

Activations = Literal["int8", "bf16"]
"""What activations become before they are multiplied by 4-bit codes."""

Head = Literal["auto", "int8"]
"""What the output layer is served in: as it is stored, or int8."""


def default_of(struct: type[msgspec.Struct], name: str) -> Any:
    """Return the default of field `name`; raise KeyError if it has none."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    if defaults[name] is msgspec.NODEFAULT:
        raise KeyError(name)
    return defaults[name]


SILENT_BEATS = 10
"""Heartbeats that a dead process has missed."""


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When the parts of a replica count as dead, and how often they are started again. Times in seconds.

    heartbeat_s: how often an idle process sends a heartbeat; it is dead after SILENT_BEATS missed ones.
    step_timeout_s: longest step, and longest time without a completed step while work waits.
    load_timeout_s: longest time without progress while loading.
    transfer_timeout_s: longest transfer between tiers, beside the time that its bytes take in a slow one.
    max_respawns: restarts of a worker without a completed step in between.
    max_deaths: deaths of a worker, or of a core, within `deaths_window_s`, also with steps in between.
    respawn_delay_s: delay before the first restart; it doubles with each further one.
    """

    heartbeat_s: float = 1.0
    step_timeout_s: float = 120.0
    load_timeout_s: float = 300.0
    transfer_timeout_s: float = 10.0
    max_respawns: int = 6
    max_deaths: int = 30
    deaths_window_s: float = 600.0
    respawn_delay_s: float = 0.1

    @property
    def silent_s(self) -> float:
        """Return how long a process or host may send nothing: SILENT_BEATS heartbeats."""
        return SILENT_BEATS * self.heartbeat_s


class UnmetError(ConfigError):
    """A value that the backend's programs cannot serve: the field `name`, and the rest of the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configure an engine core and its worker. Sizes in bytes, lengths in tokens. Raises UnmetError.

    num_blocks: blocks of each group, the null block 0 included.
    max_queued_tokens: most prompt tokens of requests without a first token; 0 for any number.
    activations: what activations become before they are multiplied by 4-bit codes.
    head: what the output layer is served in.
    kernels: instruction set of the CPU kernels, or torch; empty for the best that the machine runs.
    replica: index of the data-parallel replica.
    topology: the ranks that the model is split over.
    placements: where each rank runs; empty for one that may run anywhere.
    join_address, join_secret_file: where another host may join, and the file of the secret that it must know.
    cache_dir: folder for digests of weights; empty for none.
    packed_cache: folder for weights packed for the CPU kernels; empty for none.
    tiers, kv_store: where KV blocks are kept below the device, and when they are stored there.
    kv_events, kv_events_replay: ZeroMQ endpoints for KV events; empty for none.
    fair_scheduling: whether waiting requests start by the tokens that their cache salts got.
    traits: what programs of the backend can do.
    num_drafts: most draft tokens of a row in one step.
    ngram: how they are looked up in the row's own tokens; None if the program makes them, by draft layers or a device.
    backend_options: read by the backend alone.
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
    fair_scheduling: bool = False
    max_queued_requests: int = 4096
    max_queued_tokens: int = 0
    depth: int = 1
    traits: BackendTraits = BackendTraits()
    num_drafts: int = 0
    ngram: NgramConfig | None = None
    seed: int = 0
    num_threads: int = 0
    replica: int = 0
    topology: Topology = Topology()
    placements: tuple[Placement, ...] = ()
    join_address: str = ""
    join_secret_file: str = ""
    activations: Activations = "int8"
    head: Head = "auto"
    kernels: str = ""
    cache_dir: str = ""
    packed_cache: str = ""
    tiers: tuple[TierConfig, ...] = ()
    kv_store: StorePolicy = "through"
    kv_events: str = ""
    kv_events_replay: str = ""
    log_level: str = "info"
    log_format: LogFormat = "text"
    faults: FaultConfig = FaultConfig()
    worker_module: str = "pypto_serving.worker"
    backend_options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Refuse what programs with these traits cannot do."""
        traits, chunk, programs = self.traits, self.traits.chunk_tokens, f"the {self.backend} backend"
        rows = max(traits.padded_rows, default=self.max_num_seqs)
        if self.max_num_seqs > rows:
            problem = f"is {self.max_num_seqs}, but {programs} computes at most {rows} sequences at once"
            raise UnmetError("max_num_seqs", f"{problem}; give at most {rows}")
        beside_decodes = chunk + 1 if chunk > 1 else 1
        for name, least in (("max_num_batched_tokens", beside_decodes), ("long_prefill_token_threshold", chunk)):
            value = getattr(self, name)
            if self.enable_chunked_prefill and 0 < value < least:
                problem = f"is {value}, but {programs} computes prompts in chunks of {chunk} tokens"
                raise UnmetError(name, f"{problem}; give at least {least}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            problem = f"is {self.max_num_batched_tokens}, but without chunked prefill a step holds a whole prompt"
            longest = f"max_model_len is {self.max_model_len}; give at least {self.max_model_len}"
            raise UnmetError("max_num_batched_tokens", f"{problem}, and {longest}")
        if chunk > 1 and (step := resume_step(self.groups)) % chunk:
            problem = f"lets prompts be resumed every {step} tokens, but {programs} computes them in chunks of {chunk}"
            raise UnmetError("block_size", f"{problem}; give a multiple of {chunk}")
        if self.num_drafts > traits.max_drafts:
            problem = f"is {self.num_drafts}, but {programs} verifies at most {traits.max_drafts}; ask for fewer"
            raise UnmetError("num_drafts", problem)

    def placement(self, rank: int) -> Placement:
        """Return where the rank of this index runs."""
        return self.placements[rank] if self.placements else Placement(num_threads=self.num_threads)

    def process_name(self, kind: str) -> str:
        """Return the name of a process of this replica in logs; only further replicas have numbers."""
        return f"{kind} {self.replica}" if self.replica else kind

    @property
    def max_unfinished(self) -> int:
        """Return how many requests the replica takes at once: those with a row, and those that wait for one."""
        return self.max_num_seqs + self.max_queued_requests

    @property
    def shares_kv(self) -> bool:
        """Return True if blocks of KV, or their keys, leave the processes of this replica."""
        return bool(self.kv_events) or any(tier.tier in ("disk", "remote") for tier in self.tiers)

    @property
    def int8_kv(self) -> bool:
        """Return True if keys and values are int8."""
        return any(tensor.dtype == "int8" for tensor in self.groups[0].tensors[:1])

    @property
    def uncommitted_tokens(self) -> int:
        """Return the most tokens of a request that steps in flight compute, or whose blocks have no keys yet."""
        return self.max_num_batched_tokens * self.depth + publication_lag(self.groups)

    @property
    def longest_blocks(self) -> tuple[int, ...]:
        """Return the most blocks of each group that one request of the longest length holds."""
        return max_live_blocks(self.groups, self.max_model_len, self.uncommitted_tokens)

    @property
    def drafts_in_model(self) -> bool:
        """Return True if the model's own draft layers make drafts, when the worker asks for them."""
        return self.num_drafts > 0 and self.ngram is None and not self.traits.samples_on_device

    @property
    def num_buffers(self) -> int:
        """Return how many StepBuffers a worker has: for each dispatch that is held, and for draft layers the last."""
        return self.limits.held_dispatches + self.drafts_in_model

    @property
    def limits(self) -> BackendLimits:
        """Return what a program must be able to do."""
        return BackendLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            depth=self.depth,
            traits=msgspec.structs.replace(self.traits, max_drafts=self.num_drafts),
        )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the API process. Port 0 lets the system choose one; without `api_keys` the API is open.

    uds: path of a Unix socket, in place of host and port; empty for none.
    ssl_certfile, ssl_keyfile: files of the certificate and of its key, if it is not in there too; empty for no TLS.
    api_key_file: where the keys were read; empty for elsewhere.
    access_log: whether each HTTP answer is logged.
    log_requests, max_log_len: whether each request for an answer is, with so many characters of its prompts.
    otlp_traces_endpoint: where traces are sent; empty for no traces.
    client_priority: whether requests may name a priority.
    tool_call_parser, reasoning_parser: "auto" chooses by the model, "none" parses nothing.
    trust_request_chat_template: whether requests may bring a chat template.
    batch_dir: where files and batches are kept; None for neither.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    drain_timeout_s: float = 30.0
    access_log: bool = False
    log_requests: bool = False
    max_log_len: int = 0
    otlp_traces_endpoint: str = ""
    client_priority: bool = True
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    batch_dir: str | None = None
