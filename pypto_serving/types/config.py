"""The frozen configuration of a replica and of its HTTP server, decided by `setup`.

Defaults that depend on neither model nor machine are defined only here, as defaults of fields.
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
"""Limit of drafts of a row in one step, on a CPU."""
SHORTEST_MATCH, LONGEST_MATCH = 2, 64
NGRAM_TOKEN_BYTES = 16
"""Bytes of the n-gram index per token of a row."""


class NgramConfig(msgspec.Struct, frozen=True, kw_only=True):
    """N-gram drafts: the tokens that followed an earlier occurrence of the row's last tokens.

    A match has at least `shortest` tokens. Matches of `longest` tokens or more count as equally good.
    """

    shortest: int = SHORTEST_MATCH
    longest: int = LONGEST_MATCH


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's options for drafts, with vLLM's names. Raises ValueError."""

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
        """Return the limits of matches; derive a missing one from the other. None for other methods."""
        if self.method != "ngram":
            return None
        longest = LONGEST_MATCH if self.prompt_lookup_max is None else self.prompt_lookup_max
        shortest = min(SHORTEST_MATCH, longest) if self.prompt_lookup_min is None else self.prompt_lookup_min
        return NgramConfig(shortest=shortest, longest=longest)


Activations = Literal["int8", "bf16"]
"""Form to which activations are converted before they are multiplied by 4-bit codes."""

Head = Literal["auto", "int8"]
"""Form of the output layer in memory: as it is stored, or int8."""


def default_of(struct: type[msgspec.Struct], name: str) -> Any:
    """Return the default of field `name`. Raises KeyError if it has none."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    if defaults[name] is msgspec.NODEFAULT:
        raise KeyError(name)
    return defaults[name]


SILENT_BEATS = 10
"""A process counts as dead after this many missed heartbeats."""


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for detecting dead parts of a replica and for restarting them. Times in seconds.

    heartbeat_s: interval of heartbeats of an idle process, which is dead after SILENT_BEATS missed ones.
    step_timeout_s: limit of a step, and of the time without a completed step while work waits.
    load_timeout_s: limit of the time without progress while loading.
    transfer_timeout_s: limit of a transfer between tiers, in addition to the time to move its bytes in a slow tier.
    max_respawns: limit of restarts of a worker without a completed step in between.
    max_deaths: limit of deaths of a worker, or of a core, within `deaths_window_s`, even with steps in between.
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
        """Return how long a process or host may be silent: SILENT_BEATS heartbeats."""
        return SILENT_BEATS * self.heartbeat_s


class UnmetError(ConfigError):
    """A value that the backend's programs do not support: the field `name`, and the rest of the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and its precision. `path`: its folder, or "" for a model without files.

    tokenizer: folder of its tokenizer, if another; "" otherwise.
    hf_overrides: values in place of those of config.json.
    activations: their form before they are multiplied by 4-bit codes.
    head: form of the output layer.
    """

    path: str
    dtype: str
    vocab_size: int
    tokenizer: str = ""
    hf_overrides: dict[str, Any] = {}
    activations: Activations = "int8"
    head: Head = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of queues and steps; lengths in tokens, 0 for no limit.

    fair_scheduling: start waiting requests in order of the tokens that their cache salts got.
    max_queued_tokens: limit of prompt tokens of requests without a first token.
    """

    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    fair_scheduling: bool = False
    max_queued_requests: int = 4096
    max_queued_tokens: int = 0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache: its groups, the tiers below the device, and endpoints of KV events.

    num_blocks: blocks of each group, including the null block 0.
    kv_store: when to store blocks in lower tiers.
    kv_events, kv_events_replay: ZeroMQ endpoints of KV events; "" for none.
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
        """Return whether KV blocks, or their keys, leave the processes of this replica."""
        return bool(self.kv_events) or any(tier.tier in ("disk", "remote") for tier in self.tiers)

    @property
    def int8_kv(self) -> bool:
        """Return whether keys and values are int8."""
        return any(tensor.dtype == "int8" for tensor in self.groups[0].tensors[:1])


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The replica's ranks, their CPUs and hosts.

    replica: index of the data-parallel replica.
    placements: placement of each rank; () for one rank that may run anywhere, with `num_threads`, 0 for one per CPU.
    join_address, join_secret_file: address where another host may join, and file of the secret that it must know.
    """

    replica: int = 0
    topology: Topology = Topology()
    placements: tuple[Placement, ...] = ()
    num_threads: int = 0
    join_address: str = ""
    join_secret_file: str = ""

    def placement(self, rank: int) -> Placement:
        """Return the placement of the rank with index `rank`."""
        return self.placements[rank] if self.placements else Placement(num_threads=self.num_threads)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that only the worker and its backend read.

    kernels: instruction set of the CPU kernels, or torch; "" for the best that the machine supports.
    ngram: limits of n-gram drafts; None if the program makes drafts.
    cache_dir: folder for digests of weights; "" for none.
    packed_cache: folder for weights packed for the CPU kernels; "" for none.
    backend_options: read only by the backend.
    """

    backend: str
    kernels: str = ""
    ngram: NgramConfig | None = None
    cache_dir: str = ""
    packed_cache: str = ""
    worker_module: str = "pypto_serving.worker"
    backend_options: dict[str, Any] = {}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of an engine core and its worker, by reader. Sizes in bytes, lengths in tokens. Raises UnmetError.

    limits: the largest sizes, and the abilities of programs; read by all processes.
    scheduler, cache: read by the core, and by the API process for limits of requests.
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
        """Raise UnmetError for values that programs with these traits do not support."""
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
        """Return the limit of unfinished requests: those with a row, and those that wait for one."""
        return self.limits.max_num_seqs + self.scheduler.max_queued_requests

    @property
    def uncommitted_tokens(self) -> int:
        """Return the maximum tokens of a request that are in steps in flight, or whose blocks have no keys yet."""
        return self.limits.max_num_batched_tokens * self.limits.depth + publication_lag(self.cache.groups)

    @property
    def longest_blocks(self) -> tuple[int, ...]:
        """Return the maximum blocks of each group that one request of the longest length holds."""
        return max_live_blocks(self.cache.groups, self.limits.max_model_len, self.uncommitted_tokens)

    @property
    def drafts_in_model(self) -> bool:
        """Return whether the model's own draft layers make drafts, at the worker's request."""
        return self.num_drafts > 0 and self.worker.ngram is None and not self.limits.traits.samples_on_device

    @property
    def num_buffers(self) -> int:
        """Return the number of a worker's StepBuffers: one per held dispatch and, last, one for draft layers."""
        return self.limits.held_dispatches + self.drafts_in_model


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the API process. Port 0 lets the system choose one; without `api_keys` the API is open.

    uds: path of a Unix socket, instead of host and port; "" for none.
    ssl_certfile, ssl_keyfile: files of the certificate and, if in another file, of its key; "" for no TLS.
    api_key_file: file of the keys; "" if they do not come from a file.
    access_log: log each HTTP answer.
    log_requests, max_log_len: log each request, with this many characters of its prompts.
    otlp_traces_endpoint: address for traces; "" for no traces.
    client_priority: whether requests may name a priority.
    any_model_name: whether a name that is not served means the first one that is.
    strict_max_tokens: whether a request is refused whose max_tokens, beside its prompt, exceed the context.
    tokenizer: folder of the tokenizer and the chat template; "" for the model's.
    generation_config: "auto" takes the model's own sampling defaults, "vllm" none; else a folder with some.
    override_generation_config: values in place of these.
    default_chat_template_kwargs: what requests that name no other give to the chat template.
    tool_call_parser, reasoning_parser: "auto" chooses by the model, "none" parses nothing.
    trust_request_chat_template: whether requests may bring a chat template.
    batch_dir: folder for files and batches; None to serve neither.
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
    tokenizer: str = ""
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = {}
    default_chat_template_kwargs: dict[str, Any] = {}
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    drain_timeout_s: float = 30.0
    access_log: bool = False
    log_requests: bool = False
    max_log_len: int = 0
    otlp_traces_endpoint: str = ""
    client_priority: bool = True
    any_model_name: bool = False
    strict_max_tokens: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    batch_dir: str | None = None
