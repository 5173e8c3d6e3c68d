"""The CPU kernels of `csrc/`: a shared library, present if a C++ compiler was when the package was built."""

from __future__ import annotations

from pypto_serving.kernels.constants import GATE_HALF, INDEXER_TOKENS, PANEL
from pypto_serving.kernels.engine import Engine, hashes, populate, zeros
from pypto_serving.kernels.forms import (
    BF16,
    INT8,
    Form,
    GroupStrips,
    Int8Strips,
    Matrix,
    Stored,
    StripColumns,
    Strips,
    activations,
    most_int8_words,
    packed_form,
    planned_form,
    strips_for,
)
from pypto_serving.kernels.library import runnable
from pypto_serving.kernels.link import Courier, Extent, Link, Links, Mirrored, Mirrors
from pypto_serving.kernels.meeting import Meeting, RanksGone
from pypto_serving.kernels.ngrams import NgramDrafter
from pypto_serving.kernels.operands import (
    KVCacheLayer,
    MlaSizes,
    NormRopeParams,
    Pages,
    Routing,
    Rows,
    Scoring,
)
from pypto_serving.kernels.packing import pack_quantized, pack_rounded
from pypto_serving.kernels.peers import Peers
from pypto_serving.kernels.recording import Recording
from pypto_serving.kernels.rounding import round_int4
from pypto_serving.kernels.sampling import NativeSampler
from pypto_serving.kernels.shared import Board, SharedMemory

__all__ = [
    "BF16",
    "GATE_HALF",
    "INDEXER_TOKENS",
    "INT8",
    "PANEL",
    "Board",
    "Courier",
    "Engine",
    "Extent",
    "Form",
    "GroupStrips",
    "Int8Strips",
    "KVCacheLayer",
    "Link",
    "Links",
    "Matrix",
    "Meeting",
    "Mirrored",
    "Mirrors",
    "MlaSizes",
    "NativeSampler",
    "NgramDrafter",
    "NormRopeParams",
    "Pages",
    "Peers",
    "RanksGone",
    "Recording",
    "Routing",
    "Rows",
    "Scoring",
    "SharedMemory",
    "Stored",
    "StripColumns",
    "Strips",
    "activations",
    "hashes",
    "most_int8_words",
    "pack_quantized",
    "pack_rounded",
    "packed_form",
    "planned_form",
    "populate",
    "round_int4",
    "runnable",
    "strips_for",
    "zeros",
]
