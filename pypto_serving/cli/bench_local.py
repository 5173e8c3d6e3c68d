"""`bench throughput`, `latency` and `startup`: measure a model without a server, and the start of a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.cli.app import HelpCommand
from pypto_serving.cli.bench_common import OutputJson, write_output
from pypto_serving.cli.generate import local_model
from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.errors import ConfigError, PyptoError
from pypto_serving.setup.options import Options
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.server_url import key_in

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM


COLUMNS = {"ready_s": "ready", "answered_s": "first text", "stopped_s": "stopped"}
PERCENTILES = (10.0, 25.0, 75.0, 90.0, 99.0)
InputLen = Annotated[int, typer.Option(min=1, help="Prompt tokens.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Output tokens.")]
PromptSeed = Annotated[int, typer.Option(help="Seed of the prompts.")]


def add_to(group: typer.Typer) -> None:
    """Add the commands to a group."""
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
    with local_model(options) as llm:
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

    with local_model(options) as llm:
        taken = []
        for i in range(num_iters_warmup + num_iters):  # new prompts each time, so that nothing is cached
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


def startup(
    context: typer.Context,
    runs: Annotated[int, typer.Option(min=1, help="Starts.")] = 5,
    output_json: OutputJson = None,
) -> None:
    """Start `serve` with the options after --, and measure the seconds until it is ready and to its first text.

    For example: bench startup --runs 3 -- MODEL --packed-cache
    """
    found = [_measure(context.args) for _ in range(runs)]
    typer.echo(f"{'run':>10}" + "".join(f"{name + ' (s)':>16}" for name in COLUMNS.values()))
    middle = {key: median(times[key] for times in found) for key in COLUMNS}
    for name, times in [*enumerate(found, 1), ("median", middle)]:
        typer.echo(f"{name:>10}" + "".join(f"{times[key]:>16.3f}" for key in COLUMNS))
    write_output(output_json, found)


def _measure(arguments: list[str]) -> dict[str, float]:
    """Start a server, ask it once, and stop it; raise PyptoError if it does not start."""
    from pypto_serving.cli.client import ChatClient

    command = [sys.executable, "-m", "pypto_serving", "serve", *arguments, "--port", "0", "--log-level", "warning"]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            try:
                ready = json.loads(server.stdout.readline())
                url, model = ready["url"], ready["model"][0]
            except (ValueError, KeyError):
                server.terminate()
                said = server.stderr.read().strip() or "it said nothing"
                raise PyptoError(f"the server did not start: {said.splitlines()[-1]}") from None
            ready_s = time.perf_counter() - started_s
            stream = ChatClient(url, key_in(os.environ)).stream_text(model, "Hello", {})
            next(stream, None)
            answered_s = time.perf_counter() - started_s
            stream.close()
            stopping_s = time.perf_counter()
            server.terminate()
            server.wait()
        finally:
            server.kill()
    return {"ready_s": ready_s, "answered_s": answered_s, "stopped_s": time.perf_counter() - stopping_s}
