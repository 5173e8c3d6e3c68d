"""Options of vLLM that are none here, and what its values mean. Names of the others are in the option table."""

from __future__ import annotations

from collections.abc import Mapping

SHORT_FLAGS = {
    "tp": "-tp",
    "pp": "-pp",
    "dp": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "optimization_level": "-O",
    "compilation_config": "-cc",
}
VALUES: Mapping[str, Mapping[object, str]] = {
    "dtype": {"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
    "kv_dtype": {"bfloat16": "bf16", **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "int8")},
    "max_model_len": {"-1": "auto", -1: "auto"},
    "tool_call_parser": {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic"},
}
"""By our option: values of vLLM, and the value that means the same here, or the nearest."""

_SWITCHES = """
    aggregate_engine_logging allow_credentials async_scheduling calculate_kv_scales disable_cascade_attn
    disable_custom_all_reduce disable_fastapi_docs disable_frontend_multiprocessing disable_hybrid_kv_cache_manager
    disable_log_stats disable_mm_preprocessor_cache disable_sliding_window enable_auto_tool_choice
    enable_force_include_usage enable_log_outputs enable_prompt_tokens_details enable_reasoning
    enable_request_id_headers enable_server_load_tracking enable_ssl_refresh enable_tokenizer_info_endpoint
    enforce_eager exclude_tools_when_tool_choice_none language_model_only numa_bind skip_mm_profiling
    trust_remote_code use_tqdm_on_load use_v2_block_manager
"""
_WITH_VALUE = """
    allowed_headers allowed_methods api_server_count attention_backend chat_template_content_format code_revision
    compilation_config config_format convert cudagraph_capture_sizes disable_access_log_for_endpoints
    distributed_executor_backend guided_decoding_backend ignore_patterns limit_mm_per_prompt
    load_format log_config_file logprobs_mode max_cudagraph_capture_size max_logprobs max_num_partial_prefills
    max_parallel_loading_workers max_seq_len_to_capture mm_processor_kwargs model_impl model_loader_extra_config
    num_scheduler_steps optimization_level performance_mode preemption_mode prefix_caching_hash_algo quantization
    response_role root_path runner safetensors_load_strategy scheduler_delay_factor stream_interval
    structured_outputs_config swap_space task tokenizer_mode uvicorn_log_level
"""
_REFUSED = {
    "LoRA adapters are not served; merge them into the weights": "enable_lora lora_modules= max_loras= max_lora_rank=",
    "give a folder that holds these files": "tokenizer_revision= hf_config_path=",
    """give hf-overrides, such as '{"rope_parameters": {"rope_theta": 1000000.0}}'""": "rope_scaling= rope_theta=",
    "there is nothing like it": "logits_processors= kv_transfer_config= enable_sleep_mode return_tokens_as_token_ids",
    "set HF_TOKEN": "hf_token=",
    "set HF_HUB_CACHE": "download_dir=",
    "give kv-memory": "num_gpu_blocks_override=",
    "give kv-host-memory": "kv_offloading_size= cpu_offload_gb=",
    "give kv-events": "kv_events_config=",
    "give speculative-config": "speculative_model= num_speculative_tokens=",
    "give expert-parallel-size": "enable_expert_parallel",
    "give client-priority": "scheduling_policy=",
    "give join-address": "nnodes= node_rank= master_addr= headless",
    "put a proxy in front": "ssl_ca_certs= ssl_cert_reqs= middleware=",
}
REFUSED = {name.rstrip("="): advice for advice, names in _REFUSED.items() for name in names.split()}
"""Options that would change answers or places, and what helps."""
HARMLESS = frozenset({"auto", "fcfs", "none", "0", "0.0", "1", "{}", "False"})
"""Values of refused options that change nothing."""
VLLM_ONLY: Mapping[str, bool] = {
    **dict.fromkeys(_SWITCHES.split(), True),
    **dict.fromkeys(_WITH_VALUE.split(), False),
    **{name.rstrip("="): not name.endswith("=") for names in _REFUSED.values() for name in names.split()},
}
"""Options that are none here, and whether each is a switch; all that are not refused have no effect."""
