"""The options of `LLM` and `AsyncLLM`, as editors show them; a test compares them with the option table."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

class LLMOptions(TypedDict, total=False):
    chat_template: str | PathLike[str] | None
    tool_call_parser: (
        Literal[
            "auto",
            "none",
            "hermes",
            "qwen3_coder",
            "llama3_json",
            "pythonic",
            "lfm2",
            "olmo3",
            "mistral",
            "mistral_named",
            "granite",
            "kimi_k2",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v4",
            "functools",
            "json",
        ]
        | None
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"] | None
    dtype: Literal["auto", "float32", "bfloat16"] | None
    activations: Literal["auto", "int8", "bf16"] | None
    head: Literal["auto", "int8"] | None
    max_model_len: int | str | None
    seed: int | None
    tokenizer: str | PathLike[str] | None
    hf_overrides: Mapping[str, Any] | str | None
    generation_config: str | PathLike[str] | None
    override_generation_config: Mapping[str, Any] | str | None
    default_chat_template_kwargs: Mapping[str, Any] | str | None
    revision: str | PathLike[str] | None
    max_queued_requests: int | None
    max_queued_tokens: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    long_prefill_token_threshold: int | None
    chunked_prefill: bool | None
    speculative_config: Mapping[str, Any] | str | None
    spec_method: Literal["off", "ngram", "mtp"] | None
    spec_tokens: int | None
    fair_scheduling: bool | None
    kv_dtype: Literal["auto", "bf16", "int8"] | None
    kv_memory: int | float | str | None
    gpu_memory_utilization: float | None
    block_size: int | None
    prefix_caching: bool | None
    kv_host_memory: int | float | str | None
    kv_disk: str | PathLike[str] | None
    kv_disk_size: int | str | None
    kv_remote: str | None
    kv_store: Literal["through", "eviction"] | None
    kv_events: str | None
    kv_events_replay: str | None
    backend: Literal["cpu", "npu", "cuda", "null"] | None
    npu_platform: Literal["a2a3", "a5", "a5sim", "a2a3sim"] | None
    kernels: Literal["auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable", "torch"] | None
    packed_cache: bool | None
    num_threads: int | None
    data_parallel_size: int | None
    tensor_parallel_size: int | str | None
    pipeline_parallel_size: int | None
    expert_parallel_size: int | None
    join_address: str | None
    join_secret_file: str | PathLike[str] | None
    step_timeout: float | None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None
    log_format: Literal["text", "json"] | None
