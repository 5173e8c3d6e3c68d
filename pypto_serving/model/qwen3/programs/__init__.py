"""Prefill and decode of dense Qwen3 models in PyPTO: the programs of the 2026-08 contract, for small models.

The other files are in PyPTO's language, whose compiler reads their source: `layers.py`, `attention.py` and `output.py`
hold kernels, `prefill.py` and `decode.py` the two programs. Names in capitals there are sizes, which the compiler takes
from the globals of a function. So `build` runs these files once for each program, with the sizes of a model as globals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

_FOLDER = Path(__file__).parent
_KERNELS = ("layers", "attention", "output")
ROWS, PAGE, VOCABULARY_TILE = 16, 128, 128
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
    return names[f"qwen3_{stage}_host"]


def _constants(sizes: Sizes, tokens: int) -> dict[str, int | float]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
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
        "VOCAB_TILE": VOCABULARY_TILE,
        "VOCAB_TILES": sizes.padded_vocab // VOCABULARY_TILE,
        "IDS": 8,
        "Q_TILE": _tile(queries),
        "KV_TILE": _tile(keys),
        "HIDDEN_TILE": _tile(sizes.hidden),
        "INNER_TILE": _tile(sizes.intermediate),
        "EPS": sizes.eps,
        "SCALE": sizes.head_dim**-0.5,
        "PER_HIDDEN": 1 / sizes.hidden,
        "PER_HEAD": 1 / sizes.head_dim,
    }


def _tile(outputs: int) -> int:
    """Return the widest tile that divides outputs at least twice: PyPTO miscompiles loops of one trip."""
    return next(tile for tile in (128, 64, 32, 16) if outputs % tile == 0 and outputs > tile)
