"""Defaults of options that depend on neither model nor machine. `--help` shows them, `resolve()` applies them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.model.family import DEFAULT_BLOCK_SIZE
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import CacheConfig, EngineConfig, FaultConfig, SchedulerConfig, ServerConfig, default_of
from pypto_serving.types.drafts import DEFAULT_DRAFTS
from pypto_serving.util import GIB, format_size

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "auto",
        "seed": default_of(EngineConfig, "seed"),
        "host": default_of(ServerConfig, "host"),
        "port": default_of(ServerConfig, "port"),
        "uds": False,
        "ssl_certfile": False,
        "ssl_keyfile": False,
        "tool_call_parser": default_of(ServerConfig, "tool_call_parser"),
        "reasoning_parser": default_of(ServerConfig, "reasoning_parser"),
        "trust_request_chat_template": default_of(ServerConfig, "trust_request_chat_template"),
        "drain_timeout": default_of(ServerConfig, "drain_timeout_s"),
        "max_body_bytes": default_of(ServerConfig, "max_body_bytes"),
        "access_log": default_of(ServerConfig, "access_log"),
        "log_requests": default_of(ServerConfig, "log_requests"),
        "max_log_len": default_of(ServerConfig, "max_log_len"),
        "otlp_traces_endpoint": False,
        "client_priority": default_of(ServerConfig, "client_priority"),
        "max_queued_requests": default_of(SchedulerConfig, "max_queued_requests"),
        "max_queued_tokens": default_of(SchedulerConfig, "max_queued_tokens"),
        "long_prefill_token_threshold": default_of(SchedulerConfig, "long_prefill_token_threshold"),
        "chunked_prefill": default_of(SchedulerConfig, "enable_chunked_prefill"),
        "fair_scheduling": default_of(SchedulerConfig, "fair_scheduling"),
        "speculative_config": False,
        "spec_method": False,
        "spec_tokens": DEFAULT_DRAFTS,
        "prefix_caching": default_of(CacheConfig, "enable_prefix_caching"),
        "block_size": DEFAULT_BLOCK_SIZE,
        "kv_host_memory": False,
        "kv_disk": False,
        "kv_disk_size": 16 * GIB,
        "kv_remote": False,
        "kv_store": default_of(CacheConfig, "kv_store"),
        "kv_events": False,
        "backend": next(iter(BACKEND_DEFAULTS)),
        "packed_cache": False,
        "data_parallel_size": 1,
        "tensor_parallel_size": default_of(Topology, "tensor"),
        "pipeline_parallel_size": default_of(Topology, "pipeline"),
        "expert_parallel_size": default_of(Topology, "expert"),
        "join_address": False,
        "step_timeout": default_of(FaultConfig, "step_timeout_s"),
        "log_level": default_of(EngineConfig, "log_level"),
        "log_format": default_of(EngineConfig, "log_format"),
    }
)
"""By the name of the option; False where it is off."""

QUIET_DEFAULTS: Mapping[str, Any] = MappingProxyType({**DEFAULTS, "log_level": "warning"})
"""Defaults of `LLM` and of commands that answer on the terminal, where logs would be in the way."""


def shown_default(name: str) -> str:
    """Return the default of option `name` as help texts show it."""
    value = DEFAULTS[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    if name in ("kv_disk_size", "max_body_bytes"):
        return format_size(value).replace(" ", "")
    return f"{value:g}" if isinstance(value, float) else str(value)
