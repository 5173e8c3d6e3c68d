"""What the null backend says of a prompt's tokens."""

from __future__ import annotations

import numpy as np

from pypto_serving.backend.null.device import SAMPLER, logits_of, next_digest
from pypto_serving.types.arrays import Float32Array
from tests.simulation import Simulation


def prompt_logits(simulation: Simulation, request_id: str) -> Float32Array:
    """What the model says at each position of a prompt but the last, from histories of all tokens before."""
    config, history = simulation.config, simulation.prompts[request_id]
    fails_on = config.worker.backend_options["fails_on"]
    rows = [
        logits_of(next_digest(config.cache.groups, history[:end]), config.model.vocab_size, fails_on)
        for end in range(1, len(history))
    ]
    return np.stack(rows) if rows else np.empty((0, config.model.vocab_size), np.float32)


def is_sound(simulation: Simulation, request_id: str) -> bool:
    """Whether no logits that score the prompt of a request fail."""
    if simulation.requests[request_id].params.prompt_logprobs is None:
        return True
    return bool(np.isfinite(prompt_logits(simulation, request_id)).all())


def assert_prompt_logprobs(simulation: Simulation, request_id: str) -> None:
    """Those of a prompt came in order, once, all of them if the request ended well, and are the oracle's."""
    width = simulation.requests[request_id].params.prompt_logprobs
    parts = simulation.prompt_logprobs[request_id]
    if width is None:
        assert not parts
        return
    logits, targets = prompt_logits(simulation, request_id), np.array(simulation.prompts[request_id][1:], np.int32)
    count = sum(part.num_tokens for part in parts)
    assert count == len(targets) or simulation.last[request_id].finish_reason in ("abort", "error")
    every = np.arange(count, dtype=np.int32)
    right = SAMPLER.logprobs(logits[:count], every, targets[:count], width).pack()
    for name in ("values", "ranks", "top_ids", "top_values"):
        assert b"".join(getattr(part, name) for part in parts) == getattr(right, name)
