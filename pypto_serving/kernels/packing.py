"""Pack quantized weights from the layouts of checkpoints, on an engine's threads; round weights to int4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.abi import loaded
from pypto_serving.kernels.constants import GATE_HALF
from pypto_serving.kernels.engine import Engine
from pypto_serving.kernels.forms import BLOCK_FORMS, Blocks, ElementType, Matrix, packed_form
from pypto_serving.types.arrays import Array, BFloat16Array, Float32Array, UInt8Array
from pypto_serving.types.weights import Layout, StoredCodes, StoredFp8, StoredQuantized
from pypto_serving.util import ceil_div

MOST_ZERO = 16
"""Largest zero point that kernels support. Files have none above 15."""

MOST_INPUTS = 128
"""Largest group of inputs that are rounded to int4 together."""

_NAN_E8M0, _NAN_E4M3, _BF16_EXPONENT = 0xFF, 0x7F, 0x7F80
_SCALE_DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E8M0": np.uint8}


def pack_quantized(
    engine: Engine,
    room: Matrix,
    stored: StoredQuantized,
    n: int,
    offset: int = 0,
    half: int | None = None,
    outputs: range | None = None,
) -> None:
    """Pack a stored matrix of n rows into outputs from `offset` on of `room`, or into half 0 or 1 of each panel.

    Only `outputs` of it are packed, by default all. Raises ValueError if it has another form than `room`, does not fit,
    or contains values that its form forbids, such as NaN.
    """
    k, mine = room.k, range(n) if outputs is None else outputs
    if packed_form(stored.form, n, k) != room.form:
        raise ValueError(f"[{n}, {k}] of form {stored.form} does not go among weights of form {room.form}")
    _check_places(room, len(mine), offset, half)
    if isinstance(stored, StoredFp8):
        source, span, zeros, layout = stored.weights, min(stored.form.block[1], k), None, Layout.BYTES
        scales: Array = _fp8_scales(stored, n, k, mine)
    else:
        source, span, zeros, layout = stored.codes, min(stored.form.group, k), _zeros(stored, n, k), stored.layout
        scales, zeros = _code_scales(stored, n, k)[_rows(mine)], None if zeros is None else zeros[_rows(mine)]
        factor = np.float32(stored.factor * room.form.unit)
        if not np.isfinite(factor):
            raise ValueError(f"the factor of all weights is {stored.factor}")
        room.fill_scales(np.full(len(mine), factor), offset, half)
    refused = np.zeros(1, np.int64)
    places = {"offset": offset if half is None else half * GATE_HALF, "half": half is not None}
    source = _source(source, layout, n, k, mine)
    inputs = {"source": source, "scales": scales, "zero_points": zeros, "layout": layout, "stored_span": span}
    sizes = {"n": len(mine), "row": n, "k": k}
    engine._lib.pack_quantized(
        engine._handle, out=room.words, **room.form.fields(), **inputs, **sizes, **places, refused=refused
    )
    if refused[0]:
        wrong = "is not a number" if isinstance(stored, StoredFp8) else "is not in [-8, 7]"
        raise ValueError(f"a weight of output {mine.start + refused[0] - 1} {wrong}")


def pack_blocks(
    engine: Engine, room: Matrix, type: str, rows: UInt8Array, offset: int = 0, half: int | None = None
) -> None:
    """Pack rows of GGUF's blocks of `type`, uint8 [n, bytes of a row], as `pack_quantized` does."""
    n = len(rows)
    if room.form != BLOCK_FORMS[type]:
        raise ValueError(f"rows of {type} do not go among weights of form {room.form}")
    _check_places(room, n, offset, half)
    room.fill_scales(np.full(n, room.form.unit, np.float32), offset, half)
    places = {"offset": offset if half is None else half * GATE_HALF, "half": half is not None}
    sizes = {"source": np.ascontiguousarray(rows), "type": Blocks[type], "n": n, "k": room.k}
    engine._lib.pack_blocks(engine._handle, out=room.words, **room.form.fields(), **sizes, **places)


def _check_places(room: Matrix, n: int, offset: int, half: int | None) -> None:
    k, outputs = room.k, 2 * n if half is not None else offset + n
    if offset % GATE_HALF or offset < 0 or n < 1 or half not in (None, 0, 1) or (half is not None and n % GATE_HALF):
        raise ValueError(f"[{n}, {k}] does not go into half panels at output {offset}, half {half}")
    if room.words.size < room.form.words(outputs, k):
        raise ValueError(f"[{n}, {k}] does not go into {room.words.size} words at output {offset}")


def _rows(outputs: range) -> slice:
    return slice(outputs.start, outputs.stop)


def pack_rounded(engine: Engine, room: Matrix, source: Array, stored: ElementType, n: int) -> None:
    """Pack a stored matrix of n rows of floats as int8, rounded to nearest, symmetric, with a scale per output.

    Raises ValueError if `room` is not int8 or too small, or if `source` is too short.
    """
    k, outputs = room.k, Matrix.outputs(n)
    if room.scales is None or room.compensation is None or not room.int8 or stored is ElementType.I8 or n < 1:
        raise ValueError(f"{n} rows of {stored.name} do not become weights of {room.form}")
    if k % 4 or min(room.words.size * 4 // k, room.scales.size, room.compensation.size) < outputs:
        raise ValueError(f"[{n}, {k}] does not go into {room.words.size} words")
    if source.nbytes < n * k * stored.bytes:
        raise ValueError(f"{source.nbytes} bytes hold no [{n}, {k}] of {stored.name}")
    own = {"compensation": room.compensation, "scales": room.scales}
    engine._lib.pack_rounded(engine._handle, out=room.words, **own, source=source, stored=stored, n=n, k=k)


def _source(source: Array, layout: Layout, n: int, k: int, outputs: range) -> Array:
    """Return the stored bytes of `outputs`; in layouts along outputs, only their part of the first row."""
    size = n * k if layout is Layout.BYTES else n * k // 2
    if source.nbytes != size:
        raise ValueError(f"{source.nbytes} bytes are no [{n}, {k}] of {size}")
    if layout in (Layout.ROWS, Layout.BYTES):
        return source.reshape(n, -1)[_rows(outputs)]
    if n % 8 or outputs.start % 8 or outputs.stop % 8:
        raise ValueError(f"{n} outputs in layout {layout.name}; they must be a multiple of 8")
    words = 1 if layout is Layout.GPTQ else 8
    return source.view(np.uint32).reshape(-1, n // words)[:1, outputs.start // words : outputs.stop // words]


def are_finite(values: NDArray[Any], dtype: str) -> bool:
    """Return whether all stored numbers of `dtype` are finite, judging by their bits."""
    match dtype:
        case "BF16":
            return bool(((values & _BF16_EXPONENT) != _BF16_EXPONENT).all())
        case "F8_E8M0" | "U8":
            return bool((values != _NAN_E8M0).all())
        case "F8_E4M3":
            return bool(((values & _NAN_E4M3) != _NAN_E4M3).all())
    return bool(np.isfinite(values).all())


def _code_scales(stored: StoredCodes, n: int, k: int) -> Array:
    scales, form = np.ascontiguousarray(stored.scales), stored.form
    wanted = (n, ceil_div(k, min(form.group, k)))
    if scales.shape != wanted or scales.dtype != _SCALE_DTYPES[form.scale_dtype]:
        raise ValueError(f"scales must be {form.scale_dtype} {list(wanted)}, not {scales.dtype} {list(scales.shape)}")
    if not are_finite(scales, form.scale_dtype):
        raise ValueError("a scale is not finite")
    return scales


def _zeros(stored: StoredCodes, n: int, k: int) -> UInt8Array | None:
    if (stored.zeros is not None) != stored.form.zeros:
        raise ValueError(f"zero points {'are missing' if stored.form.zeros else 'belong to no such form'}")
    if stored.zeros is None:
        return None
    zeros, wanted = np.ascontiguousarray(stored.zeros), (n, ceil_div(k, min(stored.form.group, k)))
    if zeros.shape != wanted or zeros.dtype != np.uint8:
        raise ValueError(f"zero points must be uint8 {list(wanted)}, not {zeros.dtype} {list(zeros.shape)}")
    if zeros.max(initial=0) > MOST_ZERO:
        raise ValueError(f"a zero point is {zeros.max()}, more than {MOST_ZERO}")
    return zeros


def _fp8_scales(stored: StoredFp8, n: int, k: int, outputs: range) -> Float32Array:
    """Return the scales of `outputs`, [outputs, groups]."""
    (rows, columns), scales = stored.form.block, stored.scales
    wanted = (ceil_div(n, rows), ceil_div(k, columns))
    if scales.shape != wanted or scales.dtype != np.float32:
        raise ValueError(f"scales must be float32 {list(wanted)}, not {scales.dtype} {list(scales.shape)}")
    if not np.isfinite(scales).all():
        raise ValueError("a scale is not finite")
    return np.ascontiguousarray(scales[np.arange(outputs.start, outputs.stop) // rows])


def round_int4(
    rows: Float32Array, size: int, levels: Float32Array, instruction_set: str = ""
) -> tuple[UInt8Array, BFloat16Array]:
    """Round rows [m, k] to codes [m, k / 2], two in a byte, and scales [m, k / size], in the calling thread.

    See convert/rounding.py.
    """
    m, k = rows.shape
    assert size <= MOST_INPUTS and size % 8 == 0 and k % size == 0
    codes, scales = np.empty((m, k // 2), np.uint8), np.empty((m, k // size), np.uint16)
    loaded().round_int4(
        instruction_set,
        rows=np.ascontiguousarray(rows),
        groups=scales.size,
        size=size,
        levels=levels,
        num_levels=len(levels),
        codes=codes,
        scales=scales,
    )
    return codes, scales
