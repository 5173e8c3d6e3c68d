"""Names for numpy arrays by element type."""

from __future__ import annotations

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
"""Two bfloat16 or four bytes of one row, which a product reads at once."""
BlockBytes = NDArray[np.uint8]
"""The content of one KV block of one group, uint8 [block_bytes]: all of its layers lie together."""
