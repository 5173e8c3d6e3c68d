"""Constants of the layouts in csrc/ops.h. Needed without the library too; one that is loaded must agree."""

from __future__ import annotations

from collections.abc import Mapping

PANEL = 32
"""Outputs per panel of packed weights."""

GATE_HALF = 16
"""Outputs of gate, or of up, in a panel that they share."""

SCALED = 128
"""Inputs that share a scale of int8 activations in groups."""

CODES_INPUTS = 32
"""Inputs of 4-bit codes come in multiples of it."""

FP8_INPUTS = 4
"""Inputs of FP8 weights, and those of a block, come in multiples of it."""

INDEXER_TOKENS = 16
"""Tokens scored at once before their top-k."""

MAX_DIM = 256
"""Largest head_dim, but for MLA."""

MAX_LATENT = 512
"""Largest MLA latent."""

MAX_LATENT_HEADS = 128
"""Most query heads of MLA."""

ITEM_ROWS = 96
"""Most query heads that share a kv head."""

HYPER_CONNECTION_STREAMS = 4
"""Residual streams of hyper-connections."""

_IN_LIBRARY = {
    "kPanel": PANEL,
    "kGateHalf": GATE_HALF,
    "kScaled": SCALED,
    "kIndexerTokens": INDEXER_TOKENS,
    "kMaxDim": MAX_DIM,
    "kMaxLatent": MAX_LATENT,
    "kMaxLatentHeads": MAX_LATENT_HEADS,
    "kItemRows": ITEM_ROWS,
    "kHyperConnectionStreams": HYPER_CONNECTION_STREAMS,
}


def differing(described: Mapping[str, int]) -> list[str]:
    """List the constants that are not as the library describes them, or that only one side has."""
    return sorted(name for name, _ in described.items() ^ _IN_LIBRARY.items())
