"""Replay traces from stdin in vLLM's scheduler and KV cache manager. scheduler.py starts this in vLLM's environment.

Reads one trace per line and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import msgspec
import torch
from scheduler_trace import VOCAB_SIZE, Trace, replay
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
}


class Theirs:
    """vLLM's scheduler with its default hash, and a model runner that only samples."""

    def __init__(self, trace: Trace, folder: Path) -> None:
        cache = CacheConfig(block_size=trace.block_size, enable_prefix_caching=True)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=trace.max_model_len
            ),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=trace.max_num_seqs,
                max_num_batched_tokens=trace.max_num_batched_tokens,
                max_model_len=trace.max_model_len,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )
        cache.num_gpu_blocks = trace.blocks
        attention = FullAttentionSpec(block_size=trace.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], attention)]
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=trace.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=trace.block_size,
            log_stats=True,
        )
        hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(trace.block_size, hash_function)
        self._missing: dict[str, int] = {}

    def add(self, name: str, token_ids: list[int], output: int) -> float:
        """Return the seconds to create the request, which hashes its blocks, and to add it."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        start = time.perf_counter()
        request = Request(
            request_id=name,
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        seconds = time.perf_counter() - start
        self._missing[name] = len(token_ids)
        return seconds

    def step(self) -> tuple[float, int]:
        """Return the seconds of schedule and update_from_output, and the number of sampled tokens."""
        start = time.perf_counter()
        plan = self._scheduler.schedule()
        planned = time.perf_counter()
        output, sampled = self._run(plan)
        resumed = time.perf_counter()
        self._scheduler.update_from_output(plan, output)
        return time.perf_counter() - resumed + planned - start, sampled

    def _run(self, plan: Any) -> tuple[ModelRunnerOutput, int]:
        """Return a worker's result: each request whose last known token is computed samples one."""
        for new in plan.scheduled_new_reqs:
            self._missing[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
        names, tokens = list(plan.num_scheduled_tokens), []
        for name in names:
            self._missing[name] -= plan.num_scheduled_tokens[name]
            tokens.append([] if self._missing[name] else [7])
            self._missing[name] = self._missing[name] or 1
        index = {name: i for i, name in enumerate(names)}
        output = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)
        return output, sum(map(len, tokens))


def main() -> None:
    """Answer until stdin ends. vLLM's output goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for line in sys.stdin:
            trace = msgspec.json.decode(line, type=Trace)
            answer = msgspec.json.encode(replay(trace, Theirs(trace, Path(folder))))
            print(answer.decode(), file=answers, flush=True)


if __name__ == "__main__":
    main()
