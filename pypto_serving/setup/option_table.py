"""Every option, in one table: rule, flag, help text, and default or who decides it.

`Options`, flags, the configuration file, `LLM(...)`, help texts and fixed defaults are derived from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.setup import rules
from pypto_serving.setup.rules import (
    FLAG,
    KERNELS,
    LOG_LEVELS,
    MAX_RANKS,
    MAX_TOKENS,
    SWITCH,
    TEXT,
    Option,
    Rule,
    choice,
    integer,
    json_object,
    number,
)
from pypto_serving.types.config import (
    DEFAULT_DRAFTS,
    MAX_DRAFTS,
    Activations,
    CacheConfig,
    EngineConfig,
    FaultConfig,
    Head,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from pypto_serving.types.kv import DEFAULT_BLOCK_SIZE
from pypto_serving.types.server_url import KEY_VARIABLES
from pypto_serving.types.start import SECRET_VARIABLE
from pypto_serving.types.tier import StorePolicy
from pypto_serving.util import GIB, format_size, one_of

ENVIRONMENT = {"api_key": KEY_VARIABLES[0]}
"""Environment variables for options that are not given otherwise."""
REMOTE_BLOCK_BYTES = 256 << 10
"""A remote store moves blocks of at least this size at full speed."""

MODEL, SERVER, BATCHING, KV, DEVICE = "Model", "Server", "Batching", "KV cache", "Device and process"


_CPU = BACKEND_DEFAULTS["cpu"]
_MODEL = (
    Option("model", TEXT, "The same as the argument MODEL.", "MODEL", decided="the bundled one"),
    Option(
        "chat_template",
        TEXT,
        "Jinja file that replaces the model's own chat template.",
        "FILE",
        decided="the model's own",
    ),
    Option(
        "tool_call_parser",
        choice(*rules.TOOL_CALL_PARSERS),
        f"How the model writes tool calls: {one_of(rules.TOOL_CALL_PARSERS[1:])}.",
        "NAME",
        default="auto",
        decided="auto, by the chat template",
    ),
    Option(
        "reasoning_parser",
        choice(*rules.REASONING_PARSERS),
        f"How the model marks its reasoning: {one_of(rules.REASONING_PARSERS[1:])}.",
        "NAME",
        default="auto",
        decided="auto, by the chat template",
    ),
    Option("dtype", choice(*rules.DTYPES), "auto, float32 or bfloat16.", "DTYPE", default="auto"),
    Option(
        "activations",
        choice("auto", *get_args(Activations)),
        "What 4-bit weights and GGUF's blocks are multiplied by: int8, with a scale per 128 inputs, or bf16 (as 16-bit "
        "integers), slower and closer.",
        "FORM",
        decided="int8; bf16 for GGUF",
    ),
    Option(
        "head",
        choice(*get_args(Head)),
        "int8 rounds an output layer of bf16, which halves its bytes.",
        "FORM",
        decided="auto, as it is stored",
    ),
    Option(
        "max_model_len",
        rules.integer_or_auto(2, MAX_TOKENS),
        "Maximum length of prompt plus output, such as 8192 or 32k; auto: what fits, however short.",
        "TOKENS",
        decided="the longest that fits, if that is a quarter of the model's or more",
    ),
    Option("seed", integer(0, 2**63 - 1), "Seed of requests that bring none.", "N"),
    Option(
        "tokenizer",
        TEXT,
        "Folder or hub name of another tokenizer, with its chat template.",
        "MODEL",
        decided="the model's own",
    ),
    Option(
        "hf_overrides",
        json_object('{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'),
        "Values in place of those of config.json; objects are joined, and null means what it means there.",
        "JSON",
        decided="none",
    ),
    Option(
        "generation_config",
        TEXT,
        "Where sampling defaults come from: auto, the model's generation_config.json; vllm, none; or a folder.",
        "NAME",
        default="auto",
    ),
    Option(
        "override_generation_config",
        json_object('{"temperature": 0.6, "top_p": 0.95}'),
        "Values in place of those of generation_config.json.",
        "JSON",
        decided="none",
    ),
    Option(
        "default_chat_template_kwargs",
        json_object('{"enable_thinking": false}'),
        "What the chat template gets from requests that say nothing else.",
        "JSON",
        decided="none",
    ),
    Option("revision", TEXT, "Branch, tag or commit of a model of the hub.", "NAME", decided="main"),
)
_SERVER = (
    Option(
        "served_model_name",
        rules.TEXTS,
        "Name that requests use; may repeat.",
        "NAME",
        decided="the model's name",
    ),
    Option(
        "any_model_name",
        FLAG,
        "Let any other model name mean the first one, for agents that name models of their own.",
    ),
    Option("host", TEXT, "Address to listen on.", "HOST", note="this machine only"),
    Option("port", integer(0, rules.MAX_PORT), "Port to listen on; 0 takes a free one.", "PORT"),
    Option("uds", rules.SOCKET_PATH, "Unix socket to listen on, in place of host and port.", "PATH"),
    Option("ssl_certfile", TEXT, "Certificate, to serve HTTPS; SIGHUP reads it again.", "FILE"),
    Option(
        "ssl_keyfile",
        TEXT,
        "Its private key, without a password; not needed if the certificate's file has it.",
        "FILE",
    ),
    Option(
        "api_key",
        rules.API_KEYS,
        f"Key that clients may send; may repeat; --api-key-file or {ENVIRONMENT['api_key']} keeps it out of the "
        "process list.",
        "KEY",
        decided="none",
    ),
    Option(
        "allowed_origins",
        rules.ORIGINS,
        "Origin whose web pages may call the server from a browser, as in http://localhost:3000; may repeat; * is any.",
        "URL",
        decided="none",
    ),
    Option(
        "max_queued_requests",
        integer(1, 1_000_000),
        "Maximum requests that wait for a row; more are refused.",
        "N",
        offline=True,
        vllm="max_num_queued_reqs",
    ),
    Option(
        "max_queued_tokens",
        integer(0, MAX_TOKENS),
        "Maximum prompt tokens that wait or are prefilled; 0 is no limit.",
        "TOKENS",
        note="no limit",
        offline=True,
        vllm="max_num_queued_tokens",
    ),
    Option("max_body_bytes", rules.SIZE, "Largest body of a request, such as 64MiB.", "SIZE"),
    Option("batch_dir", TEXT, "Serve /v1/files and /v1/batches, kept in this folder.", "DIR", decided="none"),
    Option(
        "drain_timeout",
        number(86400, zero=True),
        "Time to finish admitted requests when told to stop.",
        "SECONDS",
        vllm="shutdown_timeout",
    ),
    Option("access_log", SWITCH, "Log one line per HTTP answer.", vllm="disable_uvicorn_access_log"),
    Option(
        "log_requests",
        SWITCH,
        "Log one line per request for tokens when it ends: its tokens, its times and why it ended.",
        alias="enable_log_requests",
        vllm="disable_log_requests",
    ),
    Option(
        "max_log_len",
        integer(0, MAX_TOKENS),
        "Characters of each prompt in that line; 0 leaves prompts out.",
        "CHARS",
    ),
    Option(
        "otlp_traces_endpoint",
        rules.COLLECTOR_URL,
        "Where OpenTelemetry traces are sent, by gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is http/protobuf.",
        "URL",
    ),
    Option("client_priority", SWITCH, "Let requests choose their priority."),
    Option(
        "strict_max_tokens",
        FLAG,
        "Refuse requests whose max_tokens do not fit beside the prompt; otherwise they are cut.",
    ),
    Option("trust_request_chat_template", FLAG, "Let requests bring a chat template."),
)
_BATCHING = (
    Option("max_num_seqs", integer(1, 65536), "Maximum requests in one step.", "N", decided=str(_CPU.max_num_seqs)),
    Option(
        "max_num_batched_tokens",
        integer(1, 1 << 20),
        "Token budget of one step.",
        "TOKENS",
        decided=str(_CPU.max_num_batched_tokens),
    ),
    Option(
        "long_prefill_token_threshold",
        integer(0, MAX_TOKENS),
        "Maximum prompt tokens of one request in one step; 0 is no limit.",
        "TOKENS",
        note="no limit",
    ),
    Option(
        "chunked_prefill",
        SWITCH,
        "Let a prompt spread over several steps.",
        default=True,
        vllm="enable_chunked_prefill",
    ),
    Option(
        "speculative_config",
        rules.DRAFTS,
        """How drafts are made, with vLLM's keys: {"method": "ngram", "num_speculative_tokens": 4}.""",
        "JSON",
        default=False,
    ),
    Option(
        "spec_method",
        choice("off", *rules.SPEC_METHODS),
        "Guess next tokens, and verify several in one step: ngram takes what followed the last tokens before, mtp "
        "asks the model's draft layer.",
        "NAME",
        default=False,
    ),
    Option(
        "spec_tokens", integer(1, MAX_DRAFTS), "Maximum drafts of a request in one step.", "N", default=DEFAULT_DRAFTS
    ),
    Option(
        "fair_scheduling",
        SWITCH,
        "Start next the request whose cache_salt got the fewest tokens, not the oldest.",
    ),
)
_KV = (
    Option(
        "kv_dtype",
        choice("auto", "bf16", "int8"),
        "bf16, or int8, with a scale per token and head: half the memory.",
        "FORM",
        decided="auto, as the model computes",
        vllm="kv_cache_dtype",
    ),
    Option(
        "kv_memory",
        rules.MEMORY,
        "2GiB, bytes, or a share of free memory such as 0.3.",
        "SIZE",
        decided="half of what is free",
        vllm="kv_cache_memory_bytes",
    ),
    Option(
        "gpu_memory_utilization",
        number(1, what="a share"),
        "Share of the free memory for weights, workspace and KV together; --kv-memory is for KV alone, and wins.",
        "SHARE",
        decided="none",
    ),
    Option(
        "block_size",
        rules.power_of_two(1, 1024),
        "Tokens per KV block, a power of two; the CPU kernels need at least 32.",
        "TOKENS",
        default=DEFAULT_BLOCK_SIZE,
        decided=f"{DEFAULT_BLOCK_SIZE}; with --kv-remote as many as make {format_size(REMOTE_BLOCK_BYTES)}",
    ),
    Option(
        "prefix_caching",
        SWITCH,
        "Reuse the KV of prompts that begin alike.",
        default=True,
        vllm="enable_prefix_caching",
    ),
    Option(
        "kv_host_memory",
        rules.MEMORY,
        "Also keep KV blocks that leave the device in host memory: 2GiB, or 0.3 of what is free.",
        "SIZE",
        default=False,
    ),
    Option("kv_disk", TEXT, "Also keep KV blocks on disk, for later starts too.", "DIR", default=False),
    Option("kv_disk_size", rules.SIZE, "Maximum size of the blocks in DIR.", "SIZE", default=16 * GIB),
    Option(
        "kv_remote",
        rules.POOL_URL,
        "Also keep KV blocks in a store that replicas share: mooncake://HOST:PORT.",
        "URL",
        default=False,
    ),
    Option(
        "kv_store",
        choice(*get_args(StorePolicy)),
        "When blocks go to these tiers: through, once no request uses them, or eviction, when the device is about "
        "to need their place.",
        "WHEN",
        note="once nobody uses them",
    ),
    Option(
        "kv_events",
        rules.ZMQ_ENDPOINT,
        "Publish the content of the cache for routers, in vLLM's format, at a ZeroMQ endpoint such as "
        "tcp://127.0.0.1:5557.",
        "ENDPOINT",
    ),
    Option(
        "kv_events_replay",
        rules.ZMQ_ENDPOINT,
        "Where routers ask for events that they missed.",
        "ENDPOINT",
        decided="the next port",
    ),
)
_DEVICE = (
    Option(
        "backend",
        choice(*BACKEND_DEFAULTS),
        f"{one_of([*BACKEND_DEFAULTS])} (no model, for tests).",
        "NAME",
        default=next(iter(BACKEND_DEFAULTS)),
        alias="device",
    ),
    Option(
        "npu_platform",
        choice(*BACKEND_DEFAULTS["npu"].platforms),
        f"What the npu backend runs on: {one_of(BACKEND_DEFAULTS['npu'].platforms)}.",
        "NAME",
        decided="a2a3 with an Ascend device, else its simulator",
    ),
    Option(
        "kernels",
        choice(*KERNELS),
        f"Instruction set of the CPU kernels: {one_of(KERNELS[1:-1])}; or {KERNELS[-1]}, without kernels.",
        "NAME",
        decided="auto, the best this machine runs",
    ),
    Option(
        "packed_cache",
        SWITCH,
        "Keep the weights as packed for the CPU kernels in ~/.cache/pypto-serving, for later starts.",
        default=False,
    ),
    Option(
        "num_threads", integer(1, 1024), "Threads that compute.", "N", decided="one per CPU, fewer for small models"
    ),
    Option(
        "data_parallel_size",
        integer(1, MAX_RANKS),
        "Replicas of the model; with --ep, ranks that share experts and split rows.",
        "N",
        default=1,
        alias="dp",
    ),
    Option(
        "tensor_parallel_size",
        rules.integer_or_auto(1, MAX_RANKS),
        "Processes that split each layer; auto: one per NUMA node.",
        "N",
        default=1,
        alias="tp",
    ),
    Option(
        "pipeline_parallel_size",
        integer(1, MAX_RANKS),
        "Stages of processes that split the layers.",
        "N",
        default=1,
        alias="pp",
    ),
    Option(
        "expert_parallel_size",
        integer(1, MAX_RANKS),
        "Groups of the tensor- or data-parallel processes that split experts.",
        "N",
        default=1,
        alias="ep",
    ),
    Option(
        "join_address",
        rules.HOST_PORT,
        "Where another host joins with `pypto-serving join`, for half of the ranks.",
        "HOST:PORT",
    ),
    Option("join_secret_file", TEXT, "Secret that both hosts know.", "FILE", decided=SECRET_VARIABLE),
    Option("step_timeout", number(86400), "A step that takes longer is a fault.", "SECONDS"),
    Option("log_level", choice(*LOG_LEVELS), f"{one_of(LOG_LEVELS)}.", "LEVEL"),
    Option(
        "log_format",
        choice(*rules.LOG_FORMATS),
        "text, or json: one object on each line, also of cores and workers.",
        "FORM",
    ),
)
_PANELS = {MODEL: _MODEL, SERVER: _SERVER, BATCHING: _BATCHING, KV: _KV, DEVICE: _DEVICE}
_FIELDS = {
    field.name.removesuffix("_s"): False if field.default == "" else field.default
    for part in (ServerConfig, SchedulerConfig, CacheConfig, ParallelConfig, FaultConfig, EngineConfig)
    for field in msgspec.structs.fields(part)
}
"""The default of each field of the configuration, by its option's name; False for ""."""


def _complete(row: Option, panel: str) -> Option:
    """Add the panel and, if the row has no default, the default of its configuration field."""
    says = row.decided or row.default is not None
    return row._replace(panel=panel, default=row.default if says else _FIELDS[row.name])


TABLE = tuple(_complete(row, panel) for panel, rows in _PANELS.items() for row in rows)
"""All options, in the order of help texts."""
RULES: Mapping[str, Rule] = MappingProxyType({row.name: row.rule for row in TABLE})
REASONS: Mapping[str, str] = MappingProxyType({row.name: f"default: {row.note}" for row in TABLE if row.note})
"""Reasons for fixed defaults that explain more than `default`."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {name: row.name for row in TABLE for name in (row.alias, row.vllm) if name}
)
"""Other names of options."""
SERVER_OPTIONS = frozenset(row.name for row in TABLE if row.panel == SERVER and not row.offline)
"""Options that concern only the HTTP server."""
DEFAULTS: Mapping[str, Any] = MappingProxyType({row.name: row.default for row in TABLE if row.default is not None})
"""Defaults that depend on neither model nor machine; False if the option is off."""
QUIET_DEFAULTS: Mapping[str, Any] = MappingProxyType({**DEFAULTS, "log_level": "warning"})
"""Defaults of `LLM` and of commands that answer on the terminal, where logs would disturb."""
