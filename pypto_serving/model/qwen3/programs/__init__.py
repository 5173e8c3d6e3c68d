"""Prefill and decode of dense Qwen3 models in PyPTO: the programs of the 2026-08 contract, for small models.

The other files are in PyPTO's language, whose compiler reads their source: `layers.py`, `attention.py` and `output.py`
hold kernels, `prefill.py` and `decode.py` the two programs. Names in capitals there are sizes, which the compiler takes
from the globals of a function. So `build` runs these files once for each program, with the sizes of a model as globals.
Both programs and the inline functions repeat lists of arguments, since the compiler reads them from the text of each
function. The host functions, which only pass theirs on, are written by `build`.
"""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from typing import Any, Literal, Protocol

_FOLDER = Path(__file__).parent
_KERNELS = ("layers", "attention", "output")
ROWS, PAGE = 16, 128
STEP, MOST_HIDDEN, MOST_TILES = 32, 960, 1471
"""Sizes are multiples of the first. The others: inputs of a norm, and tiles of logits, that fit into vector memory."""
_MATRIX_BYTES, _STEP_ELEMENTS = 512 << 10, 16384
"""What the compiler has for the operands of a product, and for those of one step of it on one side."""
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
    if sizes.head_dim % STEP:
        return f"head_dim is {sizes.head_dim}, but must be a multiple of {STEP}"
    if sizes.heads > ROWS * sizes.kv_heads:
        return f"{sizes.heads // sizes.kv_heads} heads share a KV head, but at most {ROWS} can"
    if sizes.hidden % STEP or sizes.hidden > MOST_HIDDEN:
        return f"hidden_size is {sizes.hidden}, but must be a multiple of {STEP} up to {MOST_HIDDEN}"
    if sizes.intermediate % STEP:
        return f"intermediate_size is {sizes.intermediate}, but must be a multiple of {STEP}"
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
    return _host(sizes, "prefill", sizes.tokens), _host(sizes, "decode", ROWS)


def sources() -> list[Path]:
    """List the files that programs are made of."""
    return sorted(_FOLDER.glob("*.py"))


def _host(sizes: Sizes, stage: Literal["prefill", "decode"], tokens: int) -> Any:
    import pypto.language as pl

    names: dict[str, Any] = {name: pl.dynamic(name) for name in _RUN_TIME_SIZES}
    names |= _constants(sizes, -(-tokens // ROWS) * ROWS) | {"__name__": f"{__name__}.{stage}"}
    for name in (*_KERNELS, stage):
        path = _FOLDER / f"{name}.py"
        exec(compile(path.read_text(), str(path), "exec"), names)
    text = _host_text(stage)
    place = f"<host function of {stage}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)  # where the compiler reads it
    exec(compile(text, place, "exec"), names)
    return names[f"qwen3_{stage}_host"]


def _host_text(stage: str) -> str:
    """Write the host function of a program, which has the same arguments."""
    functions = ast.parse((_FOLDER / f"{stage}.py").read_text()).body
    (arguments,) = (each.args for each in functions if isinstance(each, ast.FunctionDef) and each.name == stage)
    names = ", ".join(argument.arg for argument in arguments.args)
    return f"@pl.jit.host\ndef qwen3_{stage}_host({ast.unparse(arguments)}):\n    {stage}({names})\n"


def _constants(sizes: Sizes, tokens: int) -> dict[str, int | float]:
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

    It must divide the outputs at least twice: loops of one trip are miscompiled. The inputs are cut into the longest
    equal steps that fit; an odd number of them, but for one, is refused.
    """
    for tile in (128, 64, 32, 16):
        fits = inputs * (ROWS + tile) * 2 <= _MATRIX_BYTES
        steps = [inputs // step for step in range(16, inputs + 1, 16) if inputs % step == 0]
        fewest = min((count for count in steps if inputs // count * tile <= _STEP_ELEMENTS), default=3)
        if outputs % tile == 0 and outputs > tile and fits and (fewest == 1 or fewest % 2 == 0):
            return tile
    return 0
