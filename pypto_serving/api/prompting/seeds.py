"""Choose the seed of a prompt."""

from __future__ import annotations

import random

from pypto_serving.types.sampling import SamplingParams

_MASK = 2**64 - 1


class SeedSource:
    """Choose the seed of each prompt; the same engine seed draws the same seeds. Owned by Service."""

    def __init__(self, engine_seed: int) -> None:
        self._random = random.Random(engine_seed)

    def seed_of(self, params: SamplingParams) -> int:
        """Return the seed that `params` give, else draw one, as an unsigned 64-bit integer.

        Choices of one prompt share the seed; the sampler tells them apart by their choice number.
        """
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return seed & _MASK
