"""The frozen configuration of a replica and of its HTTP server, as `setup` decides it.

A default that depends on neither model nor machine is the default of its field here, and nowhere else.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.logs import LogFormat
from pypto_serving.parallel.topology import Placement, Topology
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks, publication_lag, resume_step
from pypto_serving.types.step import BackendLimits
from pypto_serving.types.tier import StorePolicy, TierConfig

DEFAULT_DRAFTS = 4
MAX_DRAFTS = 16
"""Max drafts of a row in one step, on a CPU."""
SHORTEST_MATCH, LONGEST_MATCH = 2, 64
NGRAM_TOKEN_BYTES = 16
"""Memory of the index, for each token of a row."""


class NgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How drafts are looked up: they are the tokens that followed an earlier match of the last tokens of the row.

    A match has at least `shortest` tokens. Of matches of `longest` tokens or more, none is better than another.
    """

    shortest: int = SHORTEST_MATCH
    longest: int = LONGEST_MATCH


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user gives, with vLLM's names. Raises ValueError."""

    method: Literal["ngram", "mtp"]
    num_speculative_tokens: int = DEFAULT_DRAFTS
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError
        if self.ngram is None and (self.prompt_lookup_min, self.prompt_lookup_max) != (None, None):
            raise ValueError
        if self.ngram is not None and not 1 <= self.ngram.shortest <= self.ngram.longest <= LONGEST_MATCH:
            raise ValueError

    @property
    def ngram(self) -> NgramConfig | None:
        """Return the bounds of matches; one that was not given follows from the other. None if nothing is looked up."""
        if self.method != "ngram":
            return None
        longest = LONGEST_MATCH if self.prompt_lookup_max is None else self.prompt_lookup_max
        shortest = min(SHORTEST_MATCH, longest) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return NgramConfig(shortest=shortest, longest=longest)


Activations = Literal["int8", "bf16"]
"""What activations become before they are multiplied by 4-bit codes."""

Head = Literal["auto", "int8"]
"""The form of the output layer in serving: as it is stored, or int8."""


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
    transfer_timeout_s: longest transfer between tiers, plus the time that its bytes take in a slow one.
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


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is served, and in what precision. `path` is its folder, empty for a model without files.

    activations: what activations become before they are multiplied by 4-bit codes.
    head: what the output layer is served in.
    """

    path: str
    dtype: str
    vocab_size: int
    activations: Activations = "int8"
    head: Head = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are queued and shared out among steps; lengths in tokens, 0 for no limit.

    fair_scheduling: whether waiting requests start by the tokens that their cache salts got.
    max_queued_tokens: maximum prompt tokens of requests without a first token.
    """

    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    fair_scheduling: bool = False
    max_queued_requests: int = 4096
    max_queued_tokens: int = 0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache: its groups, the tiers below the device, and who hears of its content.

    num_blocks: blocks of each group, the null block 0 included.
    kv_store: when blocks are stored in lower tiers.
    kv_events, kv_events_replay: ZeroMQ endpoints for KV events; empty for none.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    enable_prefix_caching: bool = True
    tiers: tuple[TierConfig, ...] = ()
    kv_store: StorePolicy = "through"
    kv_events: str = ""
    kv_events_replay: str = ""

    @property
    def shares_kv(self) -> bool:
        """Return True if blocks of KV, or their keys, leave the processes of this replica."""
        return bool(self.kv_events) or any(tier.tier in ("disk", "remote") for tier in self.tiers)

    @property
    def int8_kv(self) -> bool:
        """Return True if keys and values are int8."""
        return any(tensor.dtype == "int8" for tensor in self.groups[0].tensors[:1])


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replica runs: its ranks, their CPUs and hosts.

    replica: index of the data-parallel replica.
    placements: where each rank runs; empty for one that may run anywhere, with `num_threads`, 0 for one per CPU.
    join_address, join_secret_file: where another host may join, and the file of the secret that it must know.
    """

    replica: int = 0
    topology: Topology = Topology()
    placements: tuple[Placement, ...] = ()
    num_threads: int = 0
    join_address: str = ""
    join_secret_file: str = ""

    def placement(self, rank: int) -> Placement:
        """Return where the rank of this index runs."""
        return self.placements[rank] if self.placements else Placement(num_threads=self.num_threads)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker and its backend alone read.

    kernels: instruction set of the CPU kernels, or torch; empty for the best that the machine runs.
    ngram: how drafts are looked up in the row's own tokens; None if the program makes them.
    cache_dir: folder for digests of weights; empty for none.
    packed_cache: folder for weights packed for the CPU kernels; empty for none.
    backend_options: read by the backend alone.
    """

    backend: str
    kernels: str = ""
    ngram: NgramConfig | None = None
    cache_dir: str = ""
    packed_cache: str = ""
    worker_module: str = "pypto_serving.worker"
    backend_options: dict[str, Any] = {}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configure an engine core and its worker, by who reads it. Sizes in bytes, lengths in tokens. Raises UnmetError.

    limits: the largest sizes, and what the programs can do; everybody reads them.
    scheduler, cache: read by the core and, for what a request may ask, by the API process.
    parallel, worker: read by the worker and its ranks.
    """

    model: ModelConfig
    limits: BackendLimits
    cache: CacheConfig
    worker: WorkerConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    faults: FaultConfig = FaultConfig()
    seed: int = 0
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        """Refuse what programs with these traits cannot do."""
        limits, scheduler = self.limits, self.scheduler
        chunk, programs = limits.traits.chunk_tokens, f"the {self.worker.backend} backend"
        rows = max(limits.traits.padded_rows, default=limits.max_num_seqs)
        if limits.max_num_seqs > rows:
            problem = f"is {limits.max_num_seqs}, but {programs} computes at most {rows} sequences at once"
            raise UnmetError("max_num_seqs", f"{problem}; give at most {rows}")
        budget, threshold = limits.max_num_batched_tokens, scheduler.long_prefill_token_threshold
        with_decodes = chunk + 1 if chunk > 1 else 1
        for name, value, needed in (
            ("max_num_batched_tokens", budget, with_decodes),
            ("long_prefill_token_threshold", threshold, chunk),
        ):
            if scheduler.enable_chunked_prefill and 0 < value < needed:
                problem = f"is {value}, but {programs} computes prompts in chunks of {chunk} tokens"
                raise UnmetError(name, f"{problem}; give at least {needed}")
        if not scheduler.enable_chunked_prefill and budget < limits.max_model_len:
            problem = f"is {budget}, but without chunked prefill a step holds a whole prompt"
            longest = f"max_model_len is {limits.max_model_len}; give at least {limits.max_model_len}"
            raise UnmetError("max_num_batched_tokens", f"{problem}, and {longest}")
        if chunk > 1 and (step := resume_step(self.cache.groups)) % chunk:
            problem = f"lets prompts be resumed every {step} tokens, but {programs} computes them in chunks of {chunk}"
            raise UnmetError("block_size", f"{problem}; give a multiple of {chunk}")

    def process_name(self, kind: str) -> str:
        """Return the name of a process of this replica in logs; only further replicas have numbers."""
        return f"{kind} {self.parallel.replica}" if self.parallel.replica else kind

    @property
    def num_drafts(self) -> int:
        """Return the maximum number of draft tokens of a row in one step."""
        return self.limits.traits.max_drafts

    @property
    def max_unfinished(self) -> int:
        """Return how many requests the replica takes at once: those with a row, and those that wait for one."""
        return self.limits.max_num_seqs + self.scheduler.max_queued_requests

    @property
    def uncommitted_tokens(self) -> int:
        """Return the maximum tokens of a request that steps in flight compute, or whose blocks have no keys yet."""
        return self.limits.max_num_batched_tokens * self.limits.depth + publication_lag(self.cache.groups)

    @property
    def longest_blocks(self) -> tuple[int, ...]:
        """Return the maximum blocks of each group that one request of the longest length holds."""
        return max_live_blocks(self.cache.groups, self.limits.max_model_len, self.uncommitted_tokens)

    @property
    def drafts_in_model(self) -> bool:
        """Return True if the model's own draft layers make drafts, when the worker asks for them."""
        return self.num_drafts > 0 and self.worker.ngram is None and not self.limits.traits.samples_on_device

    @property
    def num_buffers(self) -> int:
        """Return how many StepBuffers a worker has: one per dispatch that is held and, last, one for draft layers."""
        return self.limits.held_dispatches + self.drafts_in_model


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configure the API process. Port 0 lets the system choose one; without `api_keys` the API is open.

    uds: path of a Unix socket, in place of host and port; empty for none.
    ssl_certfile, ssl_keyfile: files of the certificate and, if it is in another file, of its key; empty for no TLS.
    api_key_file: where the keys were read; empty for elsewhere.
    access_log: whether each HTTP answer is logged.
    log_requests, max_log_len: whether each request is logged, and how many characters of its prompts.
    otlp_traces_endpoint: where traces are sent; empty for no traces.
    client_priority: whether requests may name a priority.
    strict_max_tokens: whether a request is refused whose max_tokens, beside its prompt, exceed the context.
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
    strict_max_tokens: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    batch_dir: str | None = None
