"""Prefill and decode of dense Qwen3 models in PyPTO: the programs of the 2026-08 contract, for small models.

The other files are in PyPTO's language, whose compiler reads their source: `layers.py`, `attention.py` and `output.py`
hold kernels, `prefill.py` and `decode.py` the two programs, and `exchange.py` what several devices have
besides. Names in capitals there are sizes, which the compiler takes from the globals of a function. So `build` runs
these files once for each program, with the sizes of a model as globals.
Both programs and the inline functions repeat lists of arguments, since the compiler reads them from the text of each
function. The host functions, which only pass theirs on, are written by `build`.

Several devices run the same program, each on its heads, its columns between the products of an MLP, and its part of the
vocabulary. So each has a part of every sum that a layer adds to the hidden state. They exchange these parts through
windows, memory that other devices write: `build` passes these on to every call of `add_change`.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

_FOLDER = Path(__file__).parent
_KERNELS = ("layers", "attention", "output")
_WINDOWS = {
    "changes": "pld.DistributedTensor[[CHANGE_ROWS, HIDDEN], pl.FP32]",
    "arrived": "pld.DistributedTensor[[DEVICES, 1], pl.INT32]",
    "device": "pl.Scalar[pl.INT32]",
}
"""What a program over several devices takes besides: see `exchange.py`."""
ROWS, PAGE = 16, 128
STEP, MOST_HIDDEN, MOST_TILES = 32, 960, 1471
"""Sizes are multiples of the first. The others: inputs of a norm, and tiles of logits, that fit into vector memory."""
_MATRIX_BYTES, _STEP_ELEMENTS = 512 << 10, 16384
"""Memory for both operands of a product, and elements of one operand in a step of it."""
_RUN_TIME_SIZES = (
    "LAYERS",
    "HIDDEN_ROWS",
    "QUERIES_ROWS",
    "INNER_ROWS",
    "KV_ROWS",
    "TOKENS_IN",
    "BATCH_IN",
    "TABLE_IN",
)


class Sizes(Protocol):
    """What programs are compiled for: `tokens` of a prefill and `pages` of a row are the most that a dispatch has."""

    devices: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    padded_vocab: int
    tokens: int
    pages: int
    positions: int
    eps: float


def obstacle(sizes: Sizes) -> str:
    """Say which size the compiler refuses, or computes wrongly, and what would do; empty if it takes all of them."""
    if sizes.kv_heads % sizes.devices:
        return f"{sizes.kv_heads} KV heads cannot be split equally among {sizes.devices} devices"
    if sizes.intermediate % (sizes.devices * STEP):
        return f"intermediate_size is {sizes.intermediate}, but must be a multiple of {sizes.devices * STEP}"
    return _obstacle_of(_of_device(sizes))


def _obstacle_of(sizes: Any) -> str:
    """Say the same of the part of one device."""
    if sizes.head_dim % STEP:
        return f"head_dim is {sizes.head_dim}, but must be a multiple of {STEP}"
    if sizes.heads > ROWS * sizes.kv_heads:
        return f"{sizes.heads // sizes.kv_heads} heads share a KV head, but at most {ROWS} can"
    if sizes.hidden % STEP or sizes.hidden > MOST_HIDDEN:
        return f"hidden_size is {sizes.hidden}, but must be a multiple of {STEP} up to {MOST_HIDDEN}"
    tile = _tile(sizes.padded_vocab, sizes.hidden)
    if sizes.padded_vocab > MOST_TILES * tile:
        return (
            f"the vocabulary has {sizes.padded_vocab} tokens with padding, but with a hidden_size of {sizes.hidden} "
            f"at most {MOST_TILES * tile} fit"
        )
    inputs = {"heads * head_dim": sizes.heads * sizes.head_dim, "intermediate_size": sizes.intermediate}
    for name, count in inputs.items():
        if not _tile(sizes.hidden, count):
            would_do = next(fewer for fewer in range(count, 0, -STEP) if _tile(sizes.hidden, fewer))
            return f"{name} is {count}, which does not divide into equal steps that fit; {would_do} would do"
    return ""


def build(sizes: Sizes) -> tuple[Any, Any]:
    """Return the host functions of prefill and decode, which PyPTO compiles. Any number of layers fits them."""
    own = _of_device(sizes)
    return _host(own, "prefill", sizes.tokens), _host(own, "decode", ROWS)


def sources() -> list[Path]:
    """List the files that programs are made of."""
    return sorted(_FOLDER.glob("*.py"))


def _of_device(sizes: Sizes) -> Any:
    """Return the sizes of a device's part of a model, and as `embedded` the tokens that it embeds: all of them."""
    split = ("heads", "kv_heads", "intermediate", "padded_vocab")
    values = {name: getattr(sizes, name) for name in Sizes.__annotations__}
    parts = {name: values[name] // sizes.devices for name in split}
    return SimpleNamespace(**values | parts, embedded=sizes.padded_vocab)


def _host(sizes: Any, stage: Literal["prefill", "decode"], tokens: int) -> Any:
    import pypto.language as pl

    names: dict[str, Any] = {name: pl.dynamic(name) for name in _RUN_TIME_SIZES}
    names |= _constants(sizes, -(-tokens // ROWS) * ROWS) | {"__name__": f"{__name__}.{stage}"}
    for name in (*_KERNELS, *(("exchange",) if sizes.devices > 1 else ())):
        path = _FOLDER / f"{name}.py"
        exec(compile(path.read_text(), str(path), "exec"), names)
    texts = {"program": _program_text(stage, sizes.devices), "host function": _host_text(stage, sizes.devices)}
    for what, text in texts.items():
        place = f"<{what} of {stage} for {sizes.devices} devices>"
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)  # where the compiler reads it
        exec(compile(text, place, "exec"), names)
    return names[f"qwen3_{stage}_host"]


def _parsed(stage: str) -> tuple[ast.Module, ast.FunctionDef]:
    """Return the file of a program, and its function in it."""
    module = ast.parse((_FOLDER / f"{stage}.py").read_text())
    (function,) = (each for each in module.body if isinstance(each, ast.FunctionDef) and each.name == stage)
    return module, function


def _program_text(stage: str, devices: int) -> str:
    """Return the text of a program; over several devices it takes windows, and passes them on to `add_change`."""
    module, function = _parsed(stage)
    if devices > 1:
        function.args.args += [ast.arg(name, ast.parse(of, mode="eval").body) for name, of in _WINDOWS.items()]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "add_change":
                node.args += [ast.Name(name) for name in _WINDOWS]
    return ast.unparse(module)


def _host_text(stage: str, devices: int) -> str:
    """Write the host function of a program: each of several devices has its own arguments, except inputs."""
    arguments = _parsed(stage)[1].args.args
    names = [[_named(each, device, devices) for each in arguments] for device in range(devices)]
    if devices == 1:
        return _host_function(stage, arguments, [f"{stage}({', '.join(names[0])})"])
    taken = [each for each in arguments if _is_input(each)]
    for own in names:
        taken += [ast.arg(name, each.annotation) for name, each in zip(own, arguments, strict=True) if name != each.arg]
    lines = [
        "changes_buffer = pld.alloc_window_buffer(CHANGE_BYTES)",
        "arrived_buffer = pld.alloc_window_buffer(DEVICES * 4)",
    ]
    for device, own in enumerate(names):
        lines += [
            f"changes_{device} = pld.window(changes_buffer, [CHANGE_ROWS, HIDDEN], dtype=pl.FP32)",
            f"arrived_{device} = pld.window(arrived_buffer, [DEVICES, 1], dtype=pl.INT32)",
            f"{stage}({', '.join(own)}, changes_{device}, arrived_{device}, {device}, device={device})",
        ]
    return _host_function(stage, taken, lines)


def _named(argument: ast.arg, device: int, devices: int) -> str:
    """Name what a device's program gets of the host function's arguments."""
    return argument.arg if devices == 1 or _is_input(argument) else f"{argument.arg}_{device}"


def _host_function(stage: str, arguments: Sequence[ast.arg], lines: Sequence[str]) -> str:
    signature, body = ", ".join(map(ast.unparse, arguments)), "".join(f"    {line}\n" for line in lines)
    return f"@pl.jit.host\ndef qwen3_{stage}_host({signature}):\n{body}"


def _is_input(argument: ast.arg) -> bool:
    """Return True for inputs of a dispatch, such as token ids and slots: the tensors of integers."""
    assert argument.annotation is not None
    text = ast.unparse(argument.annotation)
    return "pl.INT32" in text and "pl.Out" not in text


def _constants(sizes: Any, tokens: int) -> dict[str, int | float]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    vocabulary_tile = _tile(sizes.padded_vocab, sizes.hidden)
    return {
        "ROWS": ROWS,
        "PAGE": PAGE,
        "TOKENS": tokens,
        "POSITIONS": sizes.positions,
        "HIDDEN": sizes.hidden,
        "HEADS": sizes.heads,
        "KV_HEADS": sizes.kv_heads,
        "GROUP": sizes.heads // sizes.kv_heads,
        "HEAD_DIM": sizes.head_dim,
        "HALF": sizes.head_dim // 2,
        "QUERIES": queries,
        "KEYS": keys,
        "QKV": queries + 2 * keys,
        "QUERY_TOKENS": tokens + ROWS,
        "QUERY_ROWS": (tokens + ROWS) * sizes.heads,
        "PARTS": sizes.pages * sizes.kv_heads * ROWS,
        "INTERMEDIATE": sizes.intermediate,
        "DEVICES": sizes.devices,
        "CHANGE_ROWS": 2 * sizes.devices * tokens,
        "CHANGE_BYTES": 2 * sizes.devices * tokens * sizes.hidden * 4,
        "EMBEDDED": sizes.embedded,
        "VOCAB": sizes.padded_vocab,
        "VOCAB_TILE": vocabulary_tile,
        "VOCAB_TILES": sizes.padded_vocab // vocabulary_tile,
        "IDS": 8,
        "Q_TILE": _tile(queries, sizes.hidden),
        "KV_TILE": _tile(keys, sizes.hidden),
        "ATTENDED_TILE": _tile(sizes.hidden, queries),
        "INNER_TILE": _tile(sizes.intermediate, sizes.hidden),
        "DOWN_TILE": _tile(sizes.hidden, sizes.intermediate),
        "EPS": sizes.eps,
        "SCALE": sizes.head_dim**-0.5,
        "PER_HIDDEN": 1 / sizes.hidden,
        "PER_HEAD": 1 / sizes.head_dim,
    }


def _tile(outputs: int, inputs: int) -> int:
    """Return the widest tile of outputs that PyPTO compiles a product in; 0 if there is none.

    It must divide the outputs into at least two tiles: loops of one trip are miscompiled. The inputs are cut into the
    longest equal steps that fit; an odd number of them, but for one, is refused.
    """
    for tile in (128, 64, 32, 16):
        fits = inputs * (ROWS + tile) * 2 <= _MATRIX_BYTES
        steps = [inputs // step for step in range(16, inputs + 1, 16) if inputs % step == 0]
        fewest = min((count for count in steps if inputs // count * tile <= _STEP_ELEMENTS), default=3)
        if outputs % tile == 0 and outputs > tile and fits and (fewest == 1 or fewest % 2 == 0):
            return tile
    return 0
