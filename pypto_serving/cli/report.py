"""Print a resolved configuration in a few lines, as aligned columns, or as JSON."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import typer

from pypto_serving.cli import terminal
from pypto_serving.setup.kv_shares import GroupPlan, MemoryPlan
from pypto_serving.setup.memory_planner import each_of
from pypto_serving.setup.options import Setting
from pypto_serving.setup.ranks import RankPlan
from pypto_serving.setup.resolver import Resolved
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import Contents, ModelSpec
from pypto_serving.util import counted, format_size

MIN_COLUMNS = 20
_NAMES = ("model", "served-model-name")
_MODEL_FACTS = ("path", "architecture", "dtype", "quantization", "num_parameters")
_CHECKPOINT_FACTS = ("source", "draft_tensors", "draft_bytes", "index", "verdicts")
_RANK_HEAD = "rank,host,stage,layers,rows,heads,KV heads,columns,experts,CPUs,node,threads,weights,KV,workspace,scoring"


def summarize(resolved: Resolved, model: ModelSpec) -> None:
    """Print model, settings other than defaults, and memory plan to stderr, in at most nine lines."""
    shown = [setting for setting in resolved.settings if setting.name not in _NAMES]
    path = next(setting.value for setting in resolved.settings if setting.name == "model")
    memory = resolved.memory
    rows = [
        ("model", f"{', '.join(resolved.server.served_model_names)}: {_facts(model)}; from {path}"),
        ("given", ", ".join(_as_given(setting) for setting in shown if setting.is_given) or "nothing"),
        ("decided", ", ".join(_as_decided(setting) for setting in shown if _is_worth_showing(setting))),
        *(
            (f"{tier} KV", ", ".join(f"{g.name} {format_size(g.total_bytes)}" for g in groups))
            for tier, groups in itertools.groupby((*memory.groups, *memory.lower), key=lambda group: group.tier)
        ),
        ("memory", _sum(memory) + each_of(len(resolved.engines))),
        ("room", _room(resolved)),
        ("reasons", "pypto-serving check, with the same options"),
    ]
    echo(columns(rows), indent=2, err=True)


def show(resolved: Resolved, model: ModelSpec, contents: Contents | None, tokenizer: str) -> None:
    """Print what was recognised of the model, settings with their reasons and memory plan to stdout."""
    values = {setting.name: str(setting.value) for setting in resolved.settings}
    known = [
        ("weights", " + ".join(form.name for form in contents.forms) if contents is not None else "none"),
        ("vocabulary", tokenizer),
        ("chats", values["chat-template"]),
        ("tool calls", values["tool-call-parser"]),
        ("reasoning", values["reasoning-parser"]),
    ]
    _print("Model", [_facts(model), *columns(known)])
    _print("Settings", columns([(s.name, _value(s.value), s.reason) for s in resolved.settings]))
    _print(f"Memory plan{each_of(len(resolved.engines))}", _memory_lines(resolved))
    if resolved.ranks:
        whose = " of the first replica" if len(resolved.engines) > 1 else ""
        _print(f"Ranks{whose}", _rank_lines(resolved.ranks, resolved.memory.workspace_bytes))


def show_files(model: ModelSpec, contents: Contents) -> None:
    """Print a model's tensors, the forms of its weights, and the memory of a sequence in each KV group, to stdout."""
    _print("Tensors", _tensor_lines(contents))
    _print("Weights", _weight_lines(model, contents))
    _print("KV of one sequence", _sequence_lines(model))


def _print(title: str, lines: Iterable[str]) -> None:
    typer.secho(title, bold=True)
    echo(lines, indent=2)


def echo(lines: Iterable[str], *, indent: int = 0, err: bool = False) -> None:
    """Print lines after `indent` spaces; on a terminal, wrap long ones between words."""
    stream = sys.stderr if err else sys.stdout
    columns = shutil.get_terminal_size().columns if stream is not None and stream.isatty() else 0
    for line in lines:
        shown = " " * indent + line
        if columns > MIN_COLUMNS and len(shown) > columns:
            shown = textwrap.fill(
                shown, columns, subsequent_indent=" " * (indent + 4), break_long_words=False, break_on_hyphens=False
            )
        terminal.write(shown, to_stderr=err, newline=True)


def as_json(
    model: ModelSpec,
    contents: Contents | None,
    resolved: Resolved | None = None,
    sampling: dict[str, Any] | None = None,
    obstacle: str = "",
    tokenizer: str = "",
) -> str:
    """Return everything as one JSON object. Without `resolved`, `obstacle` says why the model cannot be served.

    Each KV group has the memory of one sequence (`sequence`) and, if memory is planned, the group's share of it.
    """
    drafts = contents.num_parameters_with_drafts if contents is not None else model.num_parameters
    content = {
        "model": {name: getattr(model, name) for name in _MODEL_FACTS}
        | {"num_parameters_with_drafts": drafts, "tokenizer": tokenizer},
        "obstacle": obstacle,
        "tensors": contents.tensors if contents is not None else [],
        "weights": _weights(model, contents),
        "checkpoint": None if contents is None else {name: getattr(contents, name) for name in _CHECKPOINT_FACTS},
        "settings": resolved.settings if resolved is not None else [],
        "sampling_defaults": sampling or {},
        "memory": _unplanned(model) if resolved is None else planned(resolved, model),
    }
    return msgspec.json.encode(content).decode()


def _weights(model: ModelSpec, contents: Contents | None) -> dict[str, Any]:
    forms = contents.forms if contents is not None else ()
    return {
        "token_bytes": model.token_bytes,
        "bits_per_weight": round(contents.bits_per_weight, 4) if contents is not None else 0.0,
        "linear_layers": [
            msgspec.structs.asdict(form) | {"bits_per_weight": round(form.bits_per_weight, 4)} for form in forms
        ],
    }


def _unplanned(model: ModelSpec) -> dict[str, Any]:
    return {
        "weight_bytes": model.weight_bytes,
        "sequence": _sequence_totals(model),
        "groups": [
            {"name": g.name, "kind": g.kind, **_group_facts(g), "sequence": _sequence_facts(g, model)}
            for g in model.kv_groups
        ],
    }


def planned(resolved: Resolved, model: ModelSpec) -> dict[str, Any]:
    """Return the memory plan for JSON: the fields of `_unplanned`, and more.

    Groups of lower tiers follow those of the device.
    """
    memory = resolved.memory
    sequences = {group.name: _sequence_facts(group, model) for group in model.kv_groups}
    totals = ("weight_bytes", "workspace_bytes", "kv_bytes", "host_bytes", "total_bytes", "available_bytes")
    return {
        **{name: getattr(memory, name) for name in totals},
        "sequence": _sequence_totals(model),
        "groups": [
            msgspec.structs.asdict(g)
            | {"total_bytes": g.total_bytes, "num_tokens": g.num_tokens, "sequence": sequences[g.name]}
            for g in (*memory.groups, *memory.lower)
        ],
        "num_replicas": len(resolved.engines),
        "num_sequences": round(memory.num_sequences, 2),
        "ranks": msgspec.to_builtins(resolved.ranks),
    }


def _facts(model: ModelSpec) -> str:
    weights = f", {model.quantization} weights" if model.quantization else ""
    layers = counted(model.num_layers, "layer")
    return f"{model.architecture}, {_count(model.num_parameters)} parameters, {layers}{weights}"


def _as_given(setting: Setting) -> str:
    """Return a setting that the user gave, and its source if that is not its own flag."""
    origin = setting.reason.removeprefix("given ").removeprefix("by ")
    return f"{setting.name} {_value(setting.value)}" + (f" ({origin})" if origin != f"--{setting.name}" else "")


def _as_decided(setting: Setting) -> str:
    """Return a setting that was decided automatically, with the reason if a feature is off."""
    return f"{setting.name} {_value(setting.value)}" + (f" ({setting.reason})" if setting.value == "off" else "")


def _is_worth_showing(setting: Setting) -> bool:
    """Return whether the model or the machine decided a setting that is not off.

    The chat template is also shown when it is off, but not the parsers, which are off for the same reason.
    """
    unused = (False, "none", "auto") if setting.name == "chat-template" else (False, "none", "auto", "off")
    return setting.is_decided and setting.value not in unused


def _tensor_lines(contents: Contents) -> Iterable[str]:
    rows = [(t.dtype, t.count, t.num_bytes) for t in contents.tensors]
    rows.append(("all", sum(t.count for t in contents.tensors), sum(t.num_bytes for t in contents.tensors)))
    parameters = f"{contents.num_parameters} parameters"
    if contents.draft_tensors:
        rows.append(("of draft layers", contents.draft_tensors, contents.draft_bytes))
        parameters += f", {contents.num_parameters_with_drafts} with draft layers, read for --spec-method mtp only"
    cells = [(name, str(count), str(size), format_size(size)) for name, count, size in rows]
    yield from columns([("dtype", "tensors", "bytes", ""), *cells])
    yield parameters
    yield _source(contents)
    index = contents.index
    if index is not None:
        size = "" if index.total_size is None else f", {index.total_size} bytes"
        yield f"index: {counted(index.num_tensors, 'tensor')} in {counted(index.num_files, 'file')}{size}"
    yield from contents.verdicts


def _weight_lines(model: ModelSpec, contents: Contents) -> Iterable[str]:
    rows = [
        (form.name, str(form.matrices), str(form.num_parameters), f"{form.bits_per_weight:.4g}")
        for form in contents.forms
    ]
    yield from columns([("linear layers", "matrices", "weights", "bits per weight"), *rows])
    yield f"{contents.bits_per_weight:.4g} bits per weight of all"
    yield f"a token reads {model.token_bytes} bytes of weights, {format_size(model.token_bytes)}"


def _source(contents: Contents) -> str:
    """Describe the source of the table of tensors."""
    if contents.source == "files":
        return "dtypes and bytes are from the headers of the files"
    implied = "dtypes and bytes are what config.json implies"
    if contents.index is None:
        return f"there are no weights that can be read, nor an index, here: {implied}"
    here = f"{contents.index.files_here} of {contents.index.num_files} weight files are here"
    return f"{here}: {implied}"


def _group_facts(group: KVCacheGroupSpec) -> dict[str, int]:
    return {
        "num_layers": len({layer for tensor in group.tensors for layer in tensor.layers}),
        "block_tokens": group.block_size,
        "block_bytes": group.block_bytes,
    }


def _sequence_facts(group: KVCacheGroupSpec, model: ModelSpec) -> dict[str, int | float]:
    """Return the memory of a longest sequence, computed token by token; checkpoints need more."""
    blocks = group.min_live_blocks(model.max_position_embeddings)
    return {
        "bytes_per_token": _bytes_per_token([group]),
        "num_blocks": blocks,
        "total_bytes": blocks * group.block_bytes,
    }


def _bytes_per_token(groups: Sequence[KVCacheGroupSpec]) -> int | float:
    """Return the bytes of history per token in `groups`; a fraction if below one byte."""
    exact = sum((Fraction(g.block_bytes, g.block_size) for g in groups if g.keeps_history), Fraction())
    return exact.numerator if exact.denominator == 1 else float(exact)


def _sequence_totals(model: ModelSpec) -> dict[str, int | float]:
    """Sum over all groups the bytes per token, the fixed bytes per sequence, and the bytes of the longest sequence."""
    sizes = [(g, g.min_live_blocks(model.max_position_embeddings) * g.block_bytes) for g in model.kv_groups]
    return {
        "num_tokens": model.max_position_embeddings,
        "bytes_per_token": _bytes_per_token(model.kv_groups),
        "fixed_bytes": sum(size for group, size in sizes if not group.keeps_history),
        "total_bytes": sum(size for _, size in sizes),
    }


def _sequence_lines(model: ModelSpec) -> Iterable[str]:
    names = ("layers", "tokens/block", "bytes/block", "bytes/token", "blocks", "bytes")
    rows = [
        (g.name, g.kind, *map(str, (*_group_facts(g).values(), *_sequence_facts(g, model).values())))
        for g in model.kv_groups
    ]
    yield from columns([("KV group", "kind", *names), *rows])
    totals = _sequence_totals(model)
    yield (
        f"{totals['bytes_per_token']} bytes for each token and {totals['fixed_bytes']} bytes for each sequence, "
        f"{format_size(totals['total_bytes'])} at {totals['num_tokens']} tokens"
    )


def _memory_lines(resolved: Resolved) -> Iterable[str]:
    plan = resolved.memory
    head = ("KV group", "kind", "tier", "layers", "tokens/block", "bytes/block", "blocks", "memory", "tokens held")
    yield from columns([head, *map(_group_row, (*plan.groups, *plan.lower))])
    for tier in resolved.engine.cache.tiers:
        if tier.tier == "remote":
            yield f"remote tier {tier.place}, as large as it is"
    yield _sum(plan)
    if (replicas := len(resolved.engines)) > 1:
        total, free = replicas * plan.total_bytes, replicas * plan.available_bytes
        yield f"all {replicas} replicas: {format_size(total)} of {format_size(free)} free"
    yield f"room for {_room(resolved)}"


def _sum(plan: MemoryPlan) -> str:
    host = f" + host tier {format_size(plan.host_bytes)}" if plan.host_bytes else ""
    return (
        f"weights {format_size(plan.weight_bytes)} + workspace {format_size(plan.workspace_bytes)} + "
        f"KV {format_size(plan.kv_bytes)}{host} = {format_size(plan.total_bytes)} of "
        f"{format_size(plan.available_bytes)} free"
    )


def _room(resolved: Resolved) -> str:
    plan, model_len = resolved.memory, resolved.engine.limits.max_model_len
    count, each = plan.share(resolved.engine.limits.max_num_seqs, model_len)
    shorter = f", or {count} of {each}" if each < model_len else ""
    return f"{plan.num_sequences:.4g} sequences of {model_len} tokens at once{shorter}"


def _rank_lines(ranks: Sequence[RankPlan], workspace_bytes: int) -> list[str]:
    """Describe each rank's work, placement and part of the memory plan; then the memory for other processes."""
    rows = [
        (
            *map(str, (rank.index, rank.host, rank.stage)),
            _span(rank.layers),
            "all" if rank.rows == 1 else f"1/{rank.rows}",
            *map(_span, (rank.heads, rank.kv_heads, rank.columns, rank.experts)),
            _ids(rank.cpus) or "any",
            "-" if rank.node is None else str(rank.node),
            str(rank.num_threads),
            *map(format_size, (rank.weight_bytes, rank.kv_bytes, rank.workspace_bytes, rank.scoring_bytes)),
        )
        for rank in ranks
    ]
    own = sum(rank.workspace_bytes + rank.scoring_bytes for rank in ranks if rank.host == 0)
    return [
        *columns([_RANK_HEAD.split(","), *rows]),
        f"other processes of the server, with grammars and requests: at most {format_size(workspace_bytes - own)}",
    ]


def _span(span: tuple[int, int]) -> str:
    return _ids(range(*span)) or "-"


def _ids(ids: Sequence[int]) -> str:
    """Format sorted numbers like `0-3,8`."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(ids), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _group_row(group: GroupPlan) -> tuple[str, ...]:
    counts = (group.num_layers, group.block_tokens, group.block_bytes, group.num_blocks)
    memory = format_size(group.total_bytes)
    return (group.name, group.kind, group.tier, *map(str, counts), memory, str(group.num_tokens))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
