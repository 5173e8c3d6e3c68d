"""Numpy arrays by element type, and token ids in messages: little-endian int32 bytes, 40 times cheaper than a list."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
UInt64Array = NDArray[np.uint64]
BFloat16Array = NDArray[np.uint16]
"""bfloat16 as uint16 bits, since numpy has no bfloat16."""
PairArray = NDArray[np.uint32]
"""Two bfloat16 or four bytes of one row, which a GEMM reads at once."""
BlockBytes = NDArray[np.uint8]
"""The content of one KV block of one group, with all of its layers: uint8 [block_bytes]."""


_ID = np.dtype("<i4")
ID_BYTES = _ID.itemsize


def pack_ids(ids: Iterable[int] | Int32Array) -> bytes:
    """Encode ids as little-endian int32, ID_BYTES bytes each."""
    array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=np.int64)
    return array.astype(_ID, copy=False).tobytes()


def id_list(data: bytes) -> tuple[int, ...]:
    """Decode bytes of `pack_ids` to a tuple; for a few ids, this is faster than an array."""
    return struct.unpack(f"<{len(data) // ID_BYTES}i", data)


def unpack_ids(data: bytes) -> Int32Array:
    """Decode bytes of `pack_ids` to a read-only int32 view."""
    return np.frombuffer(data, _ID)


def pack_list(ids: Sequence[int]) -> bytes:
    """Encode ids like `pack_ids`; faster for a list or tuple."""
    return struct.pack(f"<{len(ids)}i", *ids)
