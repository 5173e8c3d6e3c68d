"""Histograms of /metrics, and their buckets. Observing costs one bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)
_LONG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, *(10 * 2**i for i in range(9)))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)

HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first output token.", _LONG_S),
    "vllm:inter_token_latency_seconds": ("Time between outputs of one request.", _SHORT_S),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token after the first.", _SHORT_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last output token.", _LONG_S),
    "vllm:request_queue_time_seconds": ("From arrival until first scheduled.", _LONG_S),
    "vllm:request_prefill_time_seconds": ("From first scheduled to the first token.", _LONG_S),
    "vllm:request_decode_time_seconds": ("From the first to the last token.", _LONG_S),
    "vllm:request_inference_time_seconds": ("From first scheduled to the last token.", _LONG_S),
    "vllm:request_prompt_tokens": ("Prompt tokens of a finished request.", None),
    "vllm:request_generation_tokens": ("Output tokens of a finished request.", None),
    "vllm:request_max_num_generation_tokens": ("Output tokens of the longest choice of a finished HTTP request.", None),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens of a finished request that were not cached.", None),
    "vllm:request_params_n": ("Choices of each prompt of a finished HTTP request.", _CHOICES),
    "vllm:request_params_max_tokens": ("Most output tokens of a finished HTTP request, by default too.", None),
    "vllm:request_num_preemptions": ("Preemptions of a finished request.", _PREEMPTIONS),
    "vllm:iteration_tokens_total": ("Tokens computed per engine step.", None),
}


class Histogram:
    """Counts per bucket, and the sum. `bounds` are inclusive upper ends; a last bucket takes the rest."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` once."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts in Prometheus' form, ending with +Inf."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(total)) for name, total in zip(names, accumulate(self.counts), strict=True)]


def token_bounds(max_model_len: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to the first bound that is at least `max_model_len`."""
    bounds: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            bounds.append(float(step * power))
            if bounds[-1] >= max_model_len:
                return bounds
        power *= 10
