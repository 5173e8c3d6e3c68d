"""How a resolved configuration looks: aligned lines that read well on a terminal and in a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import typer

from pypto_serving.config import Resolved
from pypto_serving.memory import GroupPlan
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import format_size

_MODEL_FACTS = ("path", "architecture", "dtype", "quantization", "num_parameters")


def show(resolved: Resolved, model: ModelSpec, *, err: bool) -> None:
    """Print model, settings with their reasons and memory plan, to stderr if `err`, else to stdout."""
    for title, lines in _sections(resolved, model):
        typer.secho(title, bold=True, err=err)
        for line in lines:
            typer.echo(f"  {line}", err=err)


def as_json(resolved: Resolved, model: ModelSpec, sampling: dict[str, Any]) -> str:
    """The same as one JSON object."""
    memory = resolved.memory
    content = {
        "model": {name: getattr(model, name) for name in _MODEL_FACTS},
        "settings": resolved.settings,
        "sampling_defaults": sampling,
        "memory": {
            "groups": [
                msgspec.structs.asdict(g) | {"total_bytes": g.total_bytes, "num_tokens": g.num_tokens}
                for g in (*memory.groups, *memory.lower)
            ],
            "weight_bytes": memory.weight_bytes,
            "workspace_bytes": memory.workspace_bytes,
            "kv_bytes": memory.kv_bytes,
            "host_bytes": memory.host_bytes,
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "num_sequences": round(memory.num_sequences, 2),
        },
    }
    return msgspec.json.encode(content).decode()


def _sections(resolved: Resolved, model: ModelSpec) -> Iterable[tuple[str, Iterable[str]]]:
    weights = f", {model.quantization} weights" if model.quantization else ""
    facts = f"{_count(model.num_parameters)} parameters, {model.num_layers} layers{weights}"
    yield "Model", [f"{model.architecture}, {facts}"]
    yield "Settings", columns([(s.name, _value(s.value), s.reason) for s in resolved.settings])
    yield "Memory plan", _memory_lines(resolved)


def _memory_lines(resolved: Resolved) -> Iterable[str]:
    plan, model_len = resolved.memory, resolved.engine.max_model_len
    head = ("KV group", "kind", "tier", "layers", "tokens/block", "bytes/block", "blocks", "memory", "tokens held")
    yield from columns([head, *map(_group_row, (*plan.groups, *plan.lower))])
    for tier in resolved.engine.tiers:
        if tier.tier == "remote":
            yield f"remote tier {tier.place}, as large as it is"
    host = f" + host tier {format_size(plan.host_bytes)}" if plan.host_bytes else ""
    yield (
        f"weights {format_size(plan.weight_bytes)} + workspace {format_size(plan.workspace_bytes)} + "
        f"KV {format_size(plan.kv_bytes)}{host} = {format_size(plan.total_bytes)} of "
        f"{format_size(plan.available_bytes)} free"
    )
    yield f"room for {plan.num_sequences:.4g} sequences of {model_len} tokens at once"


def _group_row(group: GroupPlan) -> tuple[str, ...]:
    counts = (group.num_layers, group.block_tokens, group.block_bytes, group.num_blocks)
    memory = format_size(group.total_bytes)
    return (group.name, group.kind, group.tier, *map(str, counts), memory, str(group.num_tokens))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
