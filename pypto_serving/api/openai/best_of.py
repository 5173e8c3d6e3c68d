"""best_of: make more choices of each prompt than the answer shows, and choose by mean log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pypto_serving.api.generation.choice import ChoiceOutput
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import MAX_N
from pypto_serving.util import brief


def check_best_of(best_of: int | None, n: int, stream: bool) -> int:
    """Return how many choices of each prompt to make for `n` that are shown. Raises RequestError."""
    if best_of is None:
        return n
    if not n <= best_of <= MAX_N:
        message = f"best_of is {brief(best_of)}, but must be between n, which is {n}, and {MAX_N}"
        raise RequestError(message, param="best_of")
    if stream and best_of > n:
        message = f"best_of is {best_of} and n is {n}, but the best choices are known only at the end; do not stream"
        raise RequestError(message, param="best_of")
    return best_of


def best(outputs: Sequence[ChoiceOutput], num_prompts: int, shown: int) -> list[ChoiceOutput]:
    """Return the `shown` best choices of each prompt, best first, and number them anew."""
    made = len(outputs) // num_prompts
    groups = [outputs[start : start + made] for start in range(0, len(outputs), made)]
    found = [output for group in groups for output in sorted(group, key=_mean_logprob, reverse=True)[:shown]]
    for index, output in enumerate(found):
        output.index = index
    return found


def _mean_logprob(output: ChoiceOutput) -> float:
    values = [entry.chosen.logprob for entry in output.logprobs or ()]
    return math.fsum(values) / len(values) if values else 0.0
