"""Sampling fields that change logits, as SamplingParams and JSON bodies have them."""

from __future__ import annotations

from typing import Any

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3},
    {},
    {"presence_penalty": -0.7, "logit_bias": {3: 1.5, 5: -4.0}},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.9, "allowed_token_ids": list(range(10, 90))},
    {"presence_penalty": 1.1, "frequency_penalty": -0.2, "min_tokens": 9},
    {"bad_words": ["a", "E", "th"], "top_k": 60},
    {"bad_words": ["0", "\u00fc"], "min_p": 0.004, "top_k": 200, "repetition_penalty": 1.1},
)
"""Of one request after the other; with some that change nothing beside them."""
