"""The commands of `bench`, with `serve` and `compare`: the command line of the load generator."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pypto_serving.cli import bench_common as common
from pypto_serving.cli.app import HelpCommand
from pypto_serving.cli.bench_local import add_to, startup
from pypto_serving.cli.bench_trace import trace
from pypto_serving.errors import ConfigError

if TYPE_CHECKING:
    from pypto_serving.bench.datasets import Dataset
    from pypto_serving.bench.options import RampUp


RUNNING, RESULTS, STARTS = "Measure a running server", "Compare results", "Measure a start"
REST_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}

bench_app = typer.Typer(help="Measure a server, or a model without one.", no_args_is_help=True)
bench_app.command(cls=HelpCommand, rich_help_panel=RUNNING)(trace)
bench_app.command(rich_help_panel=STARTS, context_settings=REST_ALLOWED)(startup)
add_to(bench_app)

DatasetName = Literal["random", "prefix_repetition", "custom"]
_OWN = re.compile("(?P<random>random_)|(?P<prefix_repetition>prefix_repetition_)|(?P<custom>dataset_path|custom_)")
"""The beginning of the options of each data set."""
_prompts = common.option("Prompts")
_traffic = common.option("Traffic")
_sampling = common.option("Sampling")
_repetition = common.option("Prefix repetition", metavar="N")


@bench_app.command(cls=HelpCommand, rich_help_panel=RUNNING)
def serve(
    context: typer.Context,
    backend: Annotated[Literal["openai", "openai-chat"], common.server(help="API to speak.")] = "openai",
    base_url: common.BaseUrl = None,
    host: common.Host = common.HOST,
    port: common.Port = common.PORT,
    endpoint: Annotated[str, common.server(help="Path, if not the usual one of --backend.")] = "",
    model: common.ModelName = None,
    tokenizer: Annotated[Path | None, _prompts(help="Folder with the tokenizer.json.")] = None,
    vocab_size: Annotated[int | None, _prompts(help="Random token ids are drawn below this.")] = None,
    dataset_name: Annotated[DatasetName, _prompts(help="Where prompts come from.")] = "random",
    dataset_path: Annotated[Path | None, _prompts(help="JSONL file of the custom data set.")] = None,
    num_prompts: Annotated[int, _traffic(help="Requests to measure.")] = 1000,
    request_rate: Annotated[float, _traffic(help="Requests per second; inf sends all at once.")] = math.inf,
    burstiness: Annotated[float, _traffic(help="Gamma shape of arrivals; 1 is Poisson.")] = 1.0,
    max_concurrency: Annotated[int | None, _traffic(help="Maximum requests in flight.")] = None,
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, _traffic(help="How the request rate grows.")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, _traffic(help="First request rate.")] = None,
    ramp_up_end_rps: Annotated[float | None, _traffic(help="Last request rate.")] = None,
    num_warmups: Annotated[int, _traffic(help="Requests to send first, which are not measured.")] = 0,
    ignore_eos: Annotated[
        bool,
        _sampling("--ignore-eos", help="Generate to the full length; always on for random prompts."),
    ] = False,
    temperature: Annotated[float, _sampling(help="Sampling temperature.")] = 0.0,
    disable_stream: Annotated[
        bool, common.server("--disable-stream", help="Ask for whole replies; of latencies only e2el is known then.")
    ] = False,
    goodput: Annotated[
        list[str] | None, common.result(metavar="KEY:MS", help="Limit on ttft, tpot or e2el; may repeat.")
    ] = None,
    percentile_metrics: Annotated[str, common.result(help="Metrics to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, common.result(help="Percentiles to report.")] = "99",
    save_result: common.SaveResult = False,
    save_detailed: common.SaveDetailed = False,
    result_dir: common.ResultDir = Path(),
    result_filename: common.ResultFilename = None,
    metadata: Annotated[
        list[str] | None, common.result(metavar="KEY=VALUE", help="Stored in the result; may repeat.")
    ] = None,
    seed: Annotated[int, _prompts(help="Seed of prompts and arrivals.")] = 0,
    extra_body: Annotated[str, common.server(help="JSON object merged into each request.")] = "{}",
    timeout: common.Timeout = 3600.0,
    random_input_len: Annotated[int, _prompts(help="Mean prompt tokens after the shared prefix.")] = 1024,
    random_output_len: Annotated[int, _prompts(help="Mean output tokens.")] = 128,
    random_range_ratio: Annotated[float, _prompts(help="Lengths vary by up to this fraction, in [0, 1).")] = 0.0,
    random_prefix_len: Annotated[int, _prompts(help="Tokens that all prompts share.")] = 0,
    prefix_repetition_prefix_len: Annotated[int, _repetition(help="Tokens per prefix.")] = 256,
    prefix_repetition_suffix_len: Annotated[int, _repetition(help="Tokens per prompt after its prefix.")] = 256,
    prefix_repetition_num_prefixes: Annotated[int, _repetition(help="Number of prefixes.")] = 10,
    prefix_repetition_output_len: Annotated[int, _repetition(help="Output tokens.")] = 128,
    custom_output_len: Annotated[int, _prompts(help="Output tokens of rows that set none.")] = 256,
) -> None:
    """Load a server with requests and report latencies and throughput, as `vllm bench serve` does.

    PYPTO_SERVING_API_KEY, or else OPENAI_API_KEY, is sent as bearer token. Exits with 1 if no request succeeded.
    """
    from pypto_serving.bench import datasets, options, report, runner

    _check_combinations(context, dataset_name)
    given = context.params
    dataset: Dataset
    match dataset_name:
        case "random":
            dataset = common.build(datasets.RandomData, given, "random_")
        case "prefix_repetition":
            dataset = common.build(datasets.PrefixRepetitionData, given, "prefix_repetition_")
        case "custom":
            dataset = datasets.FileData(path=dataset_path or Path(), output_len=custom_output_len)
    metrics, goals = options.parse_metrics(percentile_metrics), options.parse_goodput(goodput or [])
    if disable_stream and not common.is_given(context, "percentile_metrics"):
        metrics = (options.WHOLE_REPLY_METRIC,)
    if disable_stream:
        options.require_whole_reply("--percentile-metrics", metrics)
        options.require_whole_reply("--goodput", goals)
    percentiles = options.parse_percentiles(metric_percentiles)
    target = {
        "base_url": common.server_url(base_url, host, port),
        "extra_body": options.parse_extra_body(extra_body),
        "timeout_s": timeout,
        "stream": not disable_stream,
    }
    ramp_up = _ramp_up(ramp_up_strategy, ramp_up_start_rps, ramp_up_end_rps)
    benchmark = runner.Benchmark(
        target=common.build(options.Target, given, **target),
        traffic=common.build(options.Traffic, given, ramp_up=ramp_up),
        dataset=dataset,
        reporting=options.Reporting(metrics=metrics, percentiles=percentiles, goodput_ms=goals),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
    saving = report.Saving(
        directory=result_dir,
        file=result_filename,
        detailed=save_detailed,
        metadata=options.parse_metadata(metadata or []),
    )
    saving.check(benchmark.reporting)
    outcome = common.run_requests(lambda advance: runner.run(benchmark, advance), num_prompts)
    common.report_outcome(outcome, saving if save_result else None)


@bench_app.command(rich_help_panel=RESULTS)
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="Result to compare against.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Result to compare.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the changes into this image.")] = None,
) -> None:
    """Show two results of `bench serve` (or of `vllm bench serve`) side by side."""
    from pypto_serving.bench import plots, report

    left, right = report.load_result(a), report.load_result(b)
    typer.echo(report.render_comparison(left, right))
    if plot is not None:
        plots.plot_comparison(left, right, plot)


def _check_combinations(context: typer.Context, dataset_name: DatasetName) -> None:
    """Raise ConfigError for options that have no effect in this combination."""
    given = common.given_names(context)
    for name in given:
        own = _OWN.match(name)
        if own is not None and own.lastgroup != dataset_name:
            raise ConfigError(
                f"{common.flag(name)} belongs to --dataset-name {own.lastgroup}, but that is {dataset_name}; drop one"
            )
    if dataset_name == "custom" and "dataset_path" not in given:
        raise ConfigError("--dataset-name custom needs --dataset-path FILE.jsonl")
    common.check_shared(given)


def _ramp_up(
    strategy: Literal["linear", "exponential"] | None, start_rps: float | None, end_rps: float | None
) -> RampUp | None:
    from pypto_serving.bench.options import RampUp

    if strategy is None and start_rps is None and end_rps is None:
        return None
    if strategy is None or start_rps is None or end_rps is None:
        raise ConfigError("--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together; give all three")
    return RampUp(strategy=strategy, start_rps=start_rps, end_rps=end_rps)


@bench_app.command(rich_help_panel=RUNNING)
def sweep(
    context: typer.Context,
    base_url: common.BaseUrl = None,
    host: common.Host = common.HOST,
    port: common.Port = common.PORT,
    max_concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Requests in flight.")] = "1,2,4,8,16",
    request_rate: Annotated[str | None, typer.Option(metavar="R,R,...", help="Requests per second, instead.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests at each load.")] = 64,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    random_output_len: Annotated[int, typer.Option(help="Output tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    output_json: common.OutputJson = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the results into this image.")] = None,
) -> None:
    """Measure a running server at several loads, with random prompts, and print a line for each."""
    from pypto_serving.bench import datasets, options, plots, report, runner

    name: options.LoadName
    given = common.given_names(context)
    common.check_url(given)
    if "max_concurrency" in given and request_rate is not None:
        raise ConfigError("--max-concurrency and --request-rate exclude each other; drop one")
    if request_rate is not None:
        name, loads = "request_rate", options.parse_loads("--request-rate", request_rate, float)
    else:
        name, loads = "max_concurrency", options.parse_loads("--max-concurrency", max_concurrency, int)
    if plot is not None:
        plots.new_figure(1, 1)  # fail before the first request if nothing can be drawn
    benchmark = runner.Benchmark(
        target=options.Target(base_url=common.server_url(base_url, host, port)),
        traffic=options.Traffic(num_prompts=num_prompts, seed=seed),
        dataset=datasets.RandomData(input_len=random_input_len, output_len=random_output_len),
        reporting=options.Reporting(),
    )
    total = num_prompts * len(loads)
    results = common.run_requests(lambda advance: runner.sweep(benchmark, name, loads, advance), total)
    typer.echo(report.render_loads(results, name))
    common.write_output(output_json, results)
    if plot is not None:
        plots.plot_loads(results, name, plot)
    if not any(result["completed"] for result in results):
        raise typer.Exit(1)
