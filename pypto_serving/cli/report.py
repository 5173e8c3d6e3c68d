"""How a resolved configuration looks: aligned lines that read well on a terminal and in a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import typer

from pypto_serving.config import Resolved
from pypto_serving.memory import GroupPlan
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import format_size

_MODEL_FACTS = ("path", "architecture", "dtype", "quantization", "num_parameters")


def show(resolved: Resolved, model: ModelSpec, *, err: bool) -> None:
    """Print model, settings with their reasons and memory plan, to stderr if `err`, else to stdout."""
    for title, lines in _sections(resolved, model):
        typer.secho(title, bold=True, err=err)
        for line in lines:
            typer.echo(f"  {line}", err=err)


def show_files(model: ModelSpec) -> None:
    """Print what the files of a model hold, and what one sequence takes of each KV group, to stdout."""
    for title, lines in (("Tensors", _tensor_lines(model)), ("KV of one sequence", _sequence_lines(model))):
        typer.secho(title, bold=True)
        for line in lines:
            typer.echo(f"  {line}")


def files_as_json(model: ModelSpec) -> str:
    """The same, and why the model cannot be served, as one JSON object."""
    content = {
        "model": {name: getattr(model, name) for name in _MODEL_FACTS},
        "obstacle": model.obstacle,
        "tensors": model.stored,
        "memory": {
            "weight_bytes": model.weight_bytes,
            "groups": [{"name": g.name, "kind": g.kind, **_sequence_facts(g, model)} for g in model.kv_groups],
        },
    }
    return msgspec.json.encode(content).decode()


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


def _tensor_lines(model: ModelSpec) -> Iterable[str]:
    rows = [(t.dtype, str(t.count), str(t.num_bytes), format_size(t.num_bytes)) for t in model.stored]
    count, size = sum(t.count for t in model.stored), sum(t.num_bytes for t in model.stored)
    yield from columns([("dtype", "tensors", "bytes", ""), *rows, ("all", str(count), str(size), format_size(size))])
    yield f"{model.num_parameters} parameters, of which {format_size(model.weight_bytes)} lie in memory"
    yield from model.index


def _sequence_facts(group: KVCacheGroupSpec, model: ModelSpec) -> dict[str, int]:
    """What a sequence of the longest length needs at once, computed token by token; checkpoints come on top."""
    blocks = group.min_live_blocks(model.max_position_embeddings)
    return {
        "num_layers": len({layer for tensor in group.tensors for layer in tensor.layers}),
        "block_tokens": group.block_size,
        "block_bytes": group.block_bytes,
        "bytes_per_token": group.block_bytes // group.block_size if group.keeps_history else 0,
        "num_blocks": blocks,
        "total_bytes": blocks * group.block_bytes,
    }


def _sequence_lines(model: ModelSpec) -> Iterable[str]:
    names = ("layers", "tokens/block", "bytes/block", "bytes/token", "blocks", "bytes")
    rows = [(g.name, g.kind, *map(str, _sequence_facts(g, model).values())) for g in model.kv_groups]
    yield from columns([("KV group", "kind", *names), *rows])
    facts = [_sequence_facts(group, model) for group in model.kv_groups]
    growth, size = (sum(fact[name] for fact in facts) for name in ("bytes_per_token", "total_bytes"))
    fixed = sum(fact["total_bytes"] for fact in facts if not fact["bytes_per_token"])
    yield (
        f"{growth} bytes for each token and {fixed} bytes for each sequence, "
        f"{format_size(size)} at {model.max_position_embeddings} tokens"
    )


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
    count, each = plan.share(resolved.engine.max_num_seqs, model_len)
    shorter = f", or {count} of {each}" if each < model_len else ""
    yield f"room for {plan.num_sequences:.4g} sequences of {model_len} tokens at once{shorter}"


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
