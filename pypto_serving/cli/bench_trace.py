"""`bench trace`: replay a trace of requests, against a server or in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pypto_serving.cli import bench_common as common
from pypto_serving.errors import ConfigError
from pypto_serving.types.config import default_of
from pypto_serving.types.step import BackendLimits

if TYPE_CHECKING:
    from pypto_serving.bench.options import Target
    from pypto_serving.bench.replay import Source
    from pypto_serving.bench.report import Saving
    from pypto_serving.bench.runner import Outcome
    from pypto_serving.bench.simulator import Machine
    from pypto_serving.bench.traces import Trace

VIRTUAL = "In virtual time"
_virtual = common.option(VIRTUAL)


def trace(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="JSONL file in Mooncake's format. (default: 200 requests of Mooncake's)"),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Replay only this many requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="Replay only this many seconds of the trace.")] = None,
    scale: Annotated[str, typer.Option(help="Multiply all lengths, such as 1/16; reuse stays exact.")] = "1",
    speedup: Annotated[float, typer.Option(help="Divide the time between arrivals.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' tokens.")] = 0,
    base_url: common.BaseUrl = None,
    host: common.Host = common.HOST,
    port: common.Port = common.PORT,
    model: common.ModelName = None,
    vocab_size: Annotated[int | None, common.server(help="Token ids are below this; default: the server's.")] = None,
    timeout: common.Timeout = 3600.0,
    virtual: Annotated[bool, _virtual("--virtual", help="Drive our own scheduler and KV manager instead.")] = False,
    sweep: Annotated[str | None, _virtual(metavar="TIER=SIZE,...", help="One run per size, as device=1M,4M.")] = None,
    device_tokens: Annotated[str, _virtual(metavar="TOKENS", help="KV cache on the device.")] = "1M",
    host_tokens: Annotated[str, _virtual(metavar="TOKENS", help="KV cache in host memory.")] = "0",
    disk_tokens: Annotated[str, _virtual(metavar="TOKENS", help="KV cache on disk.")] = "0",
    block_size: Annotated[int | None, _virtual(help="Tokens per KV block; default: the trace's.")] = None,
    max_num_seqs: Annotated[int, _virtual(help="Maximum requests in one step.")] = default_of(
        BackendLimits, "max_num_seqs"
    ),
    max_num_batched_tokens: Annotated[int, _virtual(help="Token budget of one step.")] = default_of(
        BackendLimits, "max_num_batched_tokens"
    ),
    step_seconds: Annotated[float, _virtual(help="Time of a step, plus:")] = 0.021,
    token_seconds: Annotated[float, _virtual(help="for each of its tokens,")] = 0.00286,
    row_seconds: Annotated[float, _virtual(help="and for each request in it.")] = 0.0,
    plot: Annotated[Path | None, common.result(help="Draw hit rates and TTFT into this image.")] = None,
    save_result: common.SaveResult = False,
    save_detailed: common.SaveDetailed = False,
    result_dir: common.ResultDir = Path(),
    result_filename: common.ResultFilename = None,
) -> None:
    """Replay a trace with its arrivals and shared prefixes; report KV cache hits, TTFT and throughput.

    Against a server, PYPTO_SERVING_API_KEY, or else OPENAI_API_KEY, is sent as bearer token. With --virtual nothing is
    computed: the time of a step follows from --step-seconds, --token-seconds and --row-seconds. Exits with 1 if no
    request succeeded.
    """
    from pypto_serving.bench import options, plots, replay, report, simulator, traces

    _check_combinations(context, virtual)
    source = replay.Source(
        path=path or traces.EXCERPT,
        scale=traces.parse_scale(scale),
        requests=requests,
        duration_s=duration,
        speedup=speedup,
        seed=seed,
    )
    loaded = source.load()
    saving = report.Saving(
        directory=result_dir,
        file=result_filename or f"trace-{source.path.stem}-{report.timestamp()}.json",
        detailed=save_detailed,
        metadata={},
    )
    saving.check(options.Reporting())
    kept = saving if save_result else None
    if plot is not None:
        plots.new_figure(1, 1)  # fail before the run if nothing can be drawn
    if not virtual:
        target = options.Target(base_url=common.server_url(base_url, host, port), model=model, timeout_s=timeout)
        _show(*_replay(source, loaded, target, vocab_size), kept, plot)
        return
    tiers = [f"{tier}_tokens" for tier in replay.SWEPT]
    machine = common.build(
        simulator.Machine,
        context.params,
        block_size=loaded.block_size if block_size is None else block_size,
        step_s=step_seconds,
        token_s=token_seconds,
        row_s=row_seconds,
        **{name: replay.parse_tokens(common.flag(name), context.params[name]) for name in tiers},
    )
    if sweep is None:
        with common.request_progress(len(loaded.requests)) as advance:
            outcome = replay.simulate(source, loaded, machine, advance)
        _show(loaded, outcome, kept, plot)
    else:
        _sweep(source, loaded, machine, sweep, kept, plot)


def _check_combinations(context: typer.Context, virtual: bool) -> None:
    """Raise ConfigError for options that have no effect in this combination."""
    given = common.given_names(context)
    panels = {each.name: getattr(each, "rich_help_panel", None) for each in context.command.params}
    for name in given:
        if virtual and panels[name] == common.SERVER:
            raise ConfigError(f"{common.flag(name)} is about a server, and --virtual uses none; drop one")
        if not virtual and panels[name] == VIRTUAL:
            raise ConfigError(f"{common.flag(name)} has no effect on a server; add --virtual")
    if "sweep" in given and "save_detailed" in given:
        raise ConfigError("--save-detailed keeps the requests of one run, and --sweep makes several; drop one")
    common.check_shared(given)


def _replay(source: Source, loaded: Trace, target: Target, vocab_size: int | None) -> tuple[Trace, Outcome]:
    """Replay the requests that fit the server; return these and the outcome."""
    import asyncio
    import functools

    from pypto_serving.bench.client import find_model
    from pypto_serving.bench.replay import fit_window, replay
    from pypto_serving.setup.host import raise_file_limit

    raise_file_limit()  # report a limit that is too low before asking the server
    card = asyncio.run(find_model(target))
    fitting, left_out = fit_window(source, loaded, card)
    if left_out:
        typer.echo(f"warning: {left_out}", err=True)
    run = functools.partial(replay, source, fitting, target, card, vocab_size)
    return fitting, common.run_requests(run, len(fitting.requests))


def _show(loaded: Trace, outcome: Outcome, saving: Saving | None, plot: Path | None) -> None:
    from pypto_serving.bench.plots import plot_run

    common.report_outcome(outcome, saving)
    if plot is not None:
        plot_run(loaded, outcome, plot)


def _sweep(
    source: Source, loaded: Trace, machine: Machine, sweep: str, saving: Saving | None, plot: Path | None
) -> None:
    from pypto_serving.bench import plots, replay, report

    tier, sizes = replay.parse_sweep(sweep)
    with common.request_progress(len(loaded.requests) * len(sizes)) as advance:
        outcomes = replay.run_sweep(source, loaded, machine, tier, sizes, advance)
    results = [outcome.result for outcome in outcomes]
    typer.echo(report.render_sizes(tier, results))
    if saving is not None:
        typer.echo(f"saved {saving.write({'swept': tier, 'results': results})}", err=True)
    if plot is not None:
        plots.plot_sizes(tier, results, plot)
