"""`bench throughput` and `bench latency`: measure a model in this process's own engine, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.cli.bench_common import OutputJson, one_line_errors, write_output
from pypto_serving.cli.generate import local_model
from pypto_serving.cli.help import HelpCommand
from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.types.sampling import SamplingParams

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM

PERCENTILES = (10.0, 25.0, 75.0, 90.0, 99.0)
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Output tokens.")]
PromptSeed = Annotated[int, typer.Option(help="Seed of the prompts.")]


def add_to(group: typer.Typer) -> None:
    """Add both commands to a group."""
    for command in (throughput, latency):
        group.command(cls=HelpCommand, rich_help_panel="Measure a model")(command)


@takes_options(*ENGINE_PANELS)
def throughput(
    options: Options,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all at once.")] = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    prompt_seed: PromptSeed = 0,
    output_json: OutputJson = None,
) -> None:
    """Continue random prompts, all at once, and report tokens per second."""
    with one_line_errors(), local_model(options) as llm:
        prompts = _prompts(llm, num_prompts, input_len, output_len, prompt_seed)
        elapsed_s = _timed(llm, prompts, output_len)
    num_input, num_output = num_prompts * input_len, num_prompts * output_len
    result = {
        "elapsed_time": elapsed_s,
        "num_requests": num_prompts,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": num_prompts / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
    }
    _report(result, seconds=("elapsed_time",))
    write_output(output_json, result)


@takes_options(*ENGINE_PANELS)
def latency(
    options: Options,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 8,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 3,
    num_iters: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 10,
    prompt_seed: PromptSeed = 0,
    output_json: OutputJson = None,
) -> None:
    """Continue a batch of random prompts again and again, and report how long it takes."""
    import numpy as np

    with one_line_errors(), local_model(options) as llm:
        taken = []
        for i in range(num_iters_warmup + num_iters):  # other prompts each time, which no cache has
            prompts = _prompts(llm, batch_size, input_len, output_len, prompt_seed + i)
            taken.append(_timed(llm, prompts, output_len))
    counted = taken[num_iters_warmup:]
    shares = {f"p{percentile:g}": float(np.percentile(counted, percentile)) for percentile in PERCENTILES}
    result = {"avg_latency": float(np.mean(counted)), "median_latency": float(np.median(counted)), **shares}
    _report(result, seconds=result)
    write_output(output_json, result | {"latencies": counted})


def _prompts(llm: LLM, count: int, input_len: int, output_len: int, seed: int) -> list[Any]:
    """Draw random prompts; raise ConfigError if they cannot be continued."""
    from pypto_serving.bench.datasets import PromptVocabulary, RandomData

    longest = llm.config.limits.max_model_len
    if input_len + output_len > longest:
        raise ConfigError(f"--input-len and --output-len are {input_len + output_len} tokens; at most {longest} fit")
    data = RandomData(input_len=input_len, output_len=output_len)
    vocabulary = PromptVocabulary.of_size(llm.config.model.vocab_size)
    return [prompt.content for prompt in data.prompts(count, seed, vocabulary)]


def _timed(llm: LLM, prompts: list[Any], output_len: int) -> float:
    """Return the seconds until all prompts are continued by `output_len` tokens each."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    started_s = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started_s


def _report(result: dict[str, float], seconds: Collection[str]) -> None:
    for name, value in result.items():
        unit = " (s)" if name in seconds else ""
        typer.echo(f"{name.replace('_', ' ') + unit + ':':<28}{value:>12.6g}")
