"""Weights of every format: the same tokens and log-probabilities, bit by bit, in any company and after a kill."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.sampling import SamplingParams
from tests.checkpoints import DECODERS, make_checkpoint
from tests.e2e.engines import QUICK_FAULTS, Reply, engine_config, replies, run_engine
from tests.needs import needs_kernels
from tests.quantised import quantise, quantise_deepseek, quantise_parts

pytestmark = [pytest.mark.e2e, needs_kernels]

REQUESTS, OUTPUT, BUDGET = 37, 12, 128
"""Requests in a batch, output tokens of each, and tokens in a step."""
TARGETS = {4: 200, 9: 7, 20: 128, 36: 70}
"""Requests that also run alone, with the length of their prompts."""
LATER = 10
"""Steps of the first batch before the worker is killed; that needs twice as many."""
SMALL = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
DEEPSEEK = {"hidden_size": 128, "moe_intermediate_size": 96, "q_lora_rank": 64, "o_lora_rank": 32}

COMPRESSED = (
    *("int4_g32", "int4_g64_f16", "int4_g128_f32", "int4_channel", "int4_asym_g32", "int4_asym_channel", "w4a8"),
    *("w8a8", "fp8_channel", "fp8_tensor", "fp8_block", "mxfp4", "nvfp4"),
)
BLOCKS = ("blocks_bf16", "blocks_f16", "blocks_f32", "blocks_e8m0")
APART = ("matrices_fp8", "modelopt", "gptq", "gptq_asym", "gptq_v2", "awq", "auto_round", "auto_round_awq")


def plain(path: Path, kind: str = "qwen3", layers: int = 2) -> Path:
    return make_checkpoint(path, kind, "bfloat16", num_hidden_layers=layers, **SMALL)


def by_layer(path: Path, kind: str) -> None:
    """A layer in each format of compressed-tensors."""
    plain(path, kind, len(COMPRESSED))
    quantise_parts(path, {rf"model\.layers\.{i}\..*(_proj|w[123])": format for i, format in enumerate(COMPRESSED)})


def whole(path: Path, formats: tuple[str, ...], kind: str = "qwen3") -> None:
    """All layers in one format, or one layer after the other in some that config.json does not tell apart."""
    plain(path, kind, layers=max(2, len(formats)))
    quantise(path, formats)


def deepseek(path: Path, form: str) -> None:
    make_checkpoint(path, "deepseek_v4_fast", "bfloat16", **DEEPSEEK)
    quantise_deepseek(path, form)


CASES: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "bf16": (plain, {}),
    "bf16 head int8, kv int8": (plain, {"head": "int8", "kv_dtype": "int8"}),
    "compressed-tensors": (partial(by_layer, kind="qwen3"), {}),
    "compressed-tensors activations bf16": (partial(by_layer, kind="qwen3"), {"activations": "bf16"}),
    "compressed-tensors experts": (partial(by_layer, kind="qwen3_moe"), {}),
    "compressed-tensors experts head int8, kv int8": (
        partial(by_layer, kind="qwen3_moe"),
        {"head": "int8", "kv_dtype": "int8"},
    ),
    **{kind: (partial(by_layer, kind=kind), {}) for kind in DECODERS if not kind.startswith("qwen3")},
    **{f"phi3 {format}": (partial(whole, kind="phi3", formats=(format,)), {}) for format in ("gptq", "awq")},
    "blocks": (partial(whole, formats=BLOCKS), {}),
    **{format: (partial(whole, formats=(format,)), {}) for format in APART},
    **{f"deepseek_v4 {form}": (partial(deepseek, form=form), {}) for form in ("released", "base", "w8a8")},
    "deepseek_v4 released head int8, activations bf16": (
        partial(deepseek, form="released"),
        {"head": "int8", "activations": "bf16"},
    ),
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled requests, all of which run in one step at last."""
    rng = random.Random(5)
    lengths = [TARGETS.get(i) or rng.randrange(1, 20) for i in range(REQUESTS)]
    prompts = [rng.choices(range(250), k=length) for length in lengths]
    common: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 20}
    return prompts, [SamplingParams(temperature=i % 3 / 2, seed=i, **common) for i in range(REQUESTS)]


SOAKED = {*APART[1:5], *APART[6:], "compressed-tensors", "compressed-tensors experts", "bf16 head int8, kv int8"}
SOAKED |= {"bf16", *DECODERS, "phi3 gptq", "deepseek_v4 base", "deepseek_v4 w8a8", "deepseek_v4 released"}
"""Formats of which another case has a near relative, or the same one with other parts."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] if case in SOAKED else []) for case in CASES]
)
def test_same_bits(tmp_path: Path, case: str) -> None:
    make, options = CASES[case]
    make(tmp_path / "model")
    prompts, params = requests()
    steps_alone = sum(math.ceil(len(prompts[i]) / BUDGET) + OUTPUT - 1 for i in TARGETS)

    async def scenario(engine: AsyncEngine) -> None:
        alone = {i: (await replies(engine, [prompts[i]], [params[i]]))[0] for i in TARGETS}
        assert (engine.stats.num_steps, engine.stats.num_respawns) == (steps_alone, 0)
        killed = await replies(engine, prompts, params)
        assert engine.stats.num_respawns == 1
        together = await replies(engine, prompts, params)
        assert {i: together[i] for i in TARGETS} == alone
        assert killed == together
        check(together)
        assert (engine.stats.num_respawns, engine.stats.max_step_rows) == (1, REQUESTS)

    changes = {
        "faults": QUICK_FAULTS,
        "worker_module": "tests.faulty_worker",
        "backend_options": {"faults": {"1": ["after", steps_alone + LATER]}},
    }
    config = engine_config(
        tmp_path / "model", changes, max_num_batched_tokens=BUDGET, prefix_caching=False, num_threads=1, **options
    )
    run_engine(config, scenario)


def check(found: list[Reply]) -> None:
    """They are answers, and differ."""
    assert all(len(tokens) == len(values) == OUTPUT for tokens, values in found)
    assert all(math.isfinite(value.logprob) and value.logprob < 0 for _, values in found for value in values)
    assert len({tuple(tokens) for tokens, _ in found}) == REQUESTS
