"""`bench sweep`: measure a running server at several loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pypto_serving.cli import bench_common as common
from pypto_serving.errors import ConfigError


def sweep(
    context: typer.Context,
    base_url: common.BaseUrl = None,
    host: common.Host = common.HOST,
    port: common.Port = common.PORT,
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Requests in flight.")] = "1,2,4,8,16",
    rates: Annotated[str | None, typer.Option(metavar="R,R,...", help="Requests per second, instead.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests at each load.")] = 64,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Output tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    output_json: common.OutputJson = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the results into this image.")] = None,
) -> None:
    """Measure a running server at several loads, with random prompts, and print a line for each."""
    from pypto_serving.bench import datasets, options, plots, report, runner

    name: options.LoadName
    with common.one_line_errors():
        given = common.given_names(context)
        common.check_url(given)
        if "concurrency" in given and rates is not None:
            raise ConfigError("--concurrency and --rates exclude each other; drop one")
        if rates is not None:
            name, loads = "request_rate", options.parse_loads("--rates", rates, float)
        else:
            name, loads = "max_concurrency", options.parse_loads("--concurrency", concurrency, int)
        if plot is not None:
            plots.new_figure(1, 1)  # to know before the first request that it can be drawn
        benchmark = runner.Benchmark(
            target=options.Target(base_url=common.server_url(base_url, host, port)),
            traffic=options.Traffic(num_prompts=num_prompts, seed=seed),
            dataset=datasets.RandomData(input_len=input_len, output_len=output_len),
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
