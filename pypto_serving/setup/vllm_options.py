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
    trust_remote_code enable_auto_tool_choice enable_reasoning enforce_eager disable_custom_all_reduce
    disable_log_stats disable_cascade_attn disable_sliding_window disable_hybrid_kv_cache_manager use_tqdm_on_load
    calculate_kv_scales language_model_only skip_mm_profiling disable_mm_preprocessor_cache worker_use_ray numa_bind
    async_scheduling disable_frontend_multiprocessing disable_async_output_proc use_v2_block_manager
    enable_prompt_tokens_details enable_force_include_usage return_tokens_as_token_ids allow_credentials
    exclude_tools_when_tool_choice_none enable_request_id_headers enable_ssl_refresh enable_tokenizer_info_endpoint
    disable_fastapi_docs enable_server_load_tracking aggregate_engine_logging enable_log_outputs
    enable_per_request_metrics
"""
_WITH_VALUE = """
    code_revision optimization_level compilation_config attention_backend max_seq_len_to_capture
    cudagraph_capture_sizes max_cudagraph_capture_size performance_mode moe_backend all2all_backend swap_space
    preemption_mode load_format quantization config_format tokenizer_mode ignore_patterns safetensors_load_strategy
    model_loader_extra_config model_impl task runner convert limit_mm_per_prompt mm_processor_kwargs
    mm_processor_cache_gb allowed_local_media_path distributed_executor_backend api_server_count
    max_parallel_loading_workers guided_decoding_backend structured_outputs_config max_logprobs logprobs_mode
    generation_config num_scheduler_steps num_lookahead_slots scheduler_delay_factor stream_interval
    prefix_caching_hash_algo allowed_methods allowed_headers root_path uvicorn_log_level log_config_file
    disable_access_log_for_endpoints chat_template_content_format response_role show_hidden_metrics_for_version
    collect_detailed_traces max_num_partial_prefills max_long_partial_prefills
"""
_REFUSED = {
    "LoRA adapters are not served; merge them into the weights": "enable_lora lora_modules= max_loras= max_lora_rank=",
    "give MODEL as a folder that holds these files with the weights": "tokenizer= tokenizer_revision= hf_config_path=",
    "change config.json in a copy of the folder": "hf_overrides= rope_scaling= rope_theta=",
    "set the environment variable HF_TOKEN": "hf_token=",
    "set the environment variable HF_HUB_CACHE": "download_dir=",
    "give kv-memory": "num_gpu_blocks_override=",
    "give kv-host-memory": "kv_offloading_size=",
    "weights stay on the device": "cpu_offload_gb=",
    "requests bring chat_template_kwargs": "default_chat_template_kwargs=",
    "requests bring such values": "override_generation_config= logits_processors=",
    "give kv-events": "kv_events_config=",
    "give speculative-config": "speculative_model= num_speculative_tokens= ngram_prompt_lookup_max=",
    "give expert-parallel-size": "enable_expert_parallel",
    "give client-priority": "scheduling_policy=",
    "put a proxy in front": "ssl_ca_certs= ssl_cert_reqs= ssl_ciphers= middleware=",
    "give join-address": "nnodes= node_rank= master_addr= headless data_parallel_address=",
    "prefill and decode run in one server": "kv_transfer_config=",
    "engines do not sleep": "enable_sleep_mode",
}
REFUSED = {name.rstrip("="): help for help, names in _REFUSED.items() for name in names.split()}
"""Options that would change answers or places, and what helps."""
HARMLESS = frozenset({"auto", "fcfs", "none", "0", "0.0", "1", "{}", "False"})
"""Values of refused options that change nothing."""
VLLM_ONLY: Mapping[str, bool] = {
    **dict.fromkeys(_SWITCHES.split(), True),
    **dict.fromkeys(_WITH_VALUE.split(), False),
    **{name.rstrip("="): not name.endswith("=") for names in _REFUSED.values() for name in names.split()},
}
"""Options that are none here, and whether each is a switch; all that are not refused have no effect."""
