"""Constants of the layouts in csrc/ops.h. They are needed without the library, too; a loaded library must agree."""

from __future__ import annotations

from collections.abc import Mapping

PANEL = 32
"""Outputs per panel of packed weights."""

GATE_HALF = 16
"""Outputs of gate, and of up, in a panel with both."""

SCALED = 128
"""Inputs per scale in group-quantized int8 activations."""

SUPER = 256
"""Inputs per half-precision factor of scales that are int8."""

CODES_INPUTS = 32
"""The number of inputs of 4-bit weights must be a multiple of this."""

FP8_INPUTS = 4
"""The number of inputs of FP8 weights, and of each block of them, must be a multiple of this."""

INDEXER_TOKENS = 16
"""Tokens that the indexer scores at once before their top-k."""

MAX_DIM = 256
"""Largest head_dim, except in MLA."""

MAX_LATENT = 512
"""Largest MLA latent."""

MAX_LATENT_HEADS = 128
"""Largest number of query heads in MLA."""

ITEM_ROWS = 96
"""Largest number of query heads that share a kv head."""

HYPER_CONNECTION_STREAMS = 4
"""Number of residual streams with hyper-connections."""

_IN_LIBRARY = {
    "kPanel": PANEL,
    "kGateHalf": GATE_HALF,
    "kScaled": SCALED,
    "kSuper": SUPER,
    "kIndexerTokens": INDEXER_TOKENS,
    "kMaxDim": MAX_DIM,
    "kMaxLatent": MAX_LATENT,
    "kMaxLatentHeads": MAX_LATENT_HEADS,
    "kItemRows": ITEM_ROWS,
    "kHyperConnectionStreams": HYPER_CONNECTION_STREAMS,
}


def differing(described: Mapping[str, int]) -> list[str]:
    """Return the names of constants that differ from the library's description, or that only one side has."""
    return sorted(name for name, _ in described.items() ^ _IN_LIBRARY.items())
