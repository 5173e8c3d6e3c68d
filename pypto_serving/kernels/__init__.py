"""The CPU kernels of `csrc/`: a shared library, present if a C++ compiler was when the package was built."""

from __future__ import annotations

from pypto_serving.kernels.abi import runnable
from pypto_serving.kernels.collectives import NativeCollectives, SharedMemory, StepBoard
from pypto_serving.kernels.constants import GATE_HALF, INDEXER_TOKENS, PANEL
from pypto_serving.kernels.engine import Engine, hashes, populate, zeros
from pypto_serving.kernels.forms import (
    BF16,
    INT8,
    ElementType,
    GroupStrips,
    Int8Strips,
    Matrix,
    PackedForm,
    StripColumns,
    Strips,
    activations,
    most_int8_words,
    packed_form,
    planned_form,
    strips_for,
)
from pypto_serving.kernels.links import Extent, Link, Links, Mirrored, Mirrors, RankBarrier, RanksGone, ReceiveThread
from pypto_serving.kernels.ngrams import NgramDrafter
from pypto_serving.kernels.operands import (
    KVCacheLayer,
    MlaSizes,
    NormRopeParams,
    PagedRows,
    Routing,
    Scoring,
    StepRows,
)
from pypto_serving.kernels.packing import pack_quantized, pack_rounded, round_int4
from pypto_serving.kernels.recording import Recording
from pypto_serving.kernels.sampling import NativeSampler

__all__ = [
    "BF16",
    "GATE_HALF",
    "INDEXER_TOKENS",
    "INT8",
    "PANEL",
    "ElementType",
    "Engine",
    "Extent",
    "GroupStrips",
    "Int8Strips",
    "KVCacheLayer",
    "Link",
    "Links",
    "Matrix",
    "Mirrored",
    "Mirrors",
    "MlaSizes",
    "NativeCollectives",
    "NativeSampler",
    "NgramDrafter",
    "NormRopeParams",
    "PackedForm",
    "PagedRows",
    "RankBarrier",
    "RanksGone",
    "ReceiveThread",
    "Recording",
    "Routing",
    "Scoring",
    "SharedMemory",
    "StepBoard",
    "StepRows",
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
