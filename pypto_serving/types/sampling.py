"""Sampling parameters: those of the user, and the part that a worker's row needs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import SupportsFloat

import msgspec

from pypto_serving.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""Stop strings of a request, and characters of each."""
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
"""Token ids that one request may bias or allow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request. Validated when made; raises RequestError that names the field.

    - `temperature`: 0 is greedy.
    - `top_k`, `top_p`: 0 (or -1) and 1 turn the filter off.
    - `max_tokens`: None is up to the context window.
    - `seed`: None draws one at admission.
    - `logprobs` k: return log-probabilities of each output token and of the k most likely ones, from the raw logits.
    - `logit_bias`: values added to the logits of token ids.
    - `allowed_token_ids`: only these can be chosen; None allows all.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._coerce()
        _require(1 <= self.n <= 128, "n", self.n, "between 1 and 128")
        _require(
            math.isfinite(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "between 0 and 100",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(-1 <= self.top_k < 2**31, "top_k", self.top_k, "0 or -1 (off) or a positive number")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(
            self.max_tokens is None or 1 <= self.max_tokens < 2**31,
            "max_tokens",
            self.max_tokens,
            "at least 1",
        )
        limit = self.max_tokens if self.max_tokens is not None else 2**31
        _require(0 <= self.min_tokens <= limit, "min_tokens", self.min_tokens, "between 0 and max_tokens")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"between 0 and {MAX_LOGPROBS}",
        )
        _require(len(self.stop) <= MAX_STOPS, "stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS}")
        longest = max(map(len, self.stop), default=0)
        _require(longest <= MAX_STOP_CHARS, "stop", f"{longest} characters long", f"at most {MAX_STOP_CHARS}")
        _require(all(self.stop), "stop", "''", "a string or strings that are not empty")
        _require(
            all(0 <= i < 2**31 for i in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids[:8],
            "token ids",
        )
        num_ids = len(self.stop_token_ids)
        _require(num_ids <= MAX_STOP_IDS, "stop_token_ids", f"{num_ids} ids", f"at most {MAX_STOP_IDS}")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        bias, allowed = self.logit_bias, self.allowed_token_ids or ()
        _require(len(bias) <= MAX_BIASES, "logit_bias", f"{len(bias)} entries long", f"at most {MAX_BIASES}")
        _require(all(0 <= i < 2**31 for i in bias), "logit_bias", list(bias)[:8], "a mapping from token ids")
        for token_id, value in bias.items():
            _require(-100 <= value <= 100, f"logit_bias of {token_id}", value, "between -100 and 100")
        _require(self.allowed_token_ids != (), "allowed_token_ids", "empty", "at least one token id, or None for all")
        _require(len(allowed) <= MAX_BIASES, "allowed_token_ids", f"{len(allowed)} long", f"at most {MAX_BIASES}")
        _require(all(0 <= i < 2**31 for i in allowed), "allowed_token_ids", allowed[:8], "token ids")

    def _coerce(self) -> None:
        """Make plain values of what users may write: lists, numbers of numpy, one string. Raises RequestError."""

        def put(name: str, value: object) -> None:
            msgspec.structs.force_setattr(self, name, value)

        for name in ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs"):
            if getattr(self, name) is not None:
                put(name, _whole(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            put(name, _number(name, getattr(self, name)))
        stop: object = self.stop
        put("stop", (stop,) if isinstance(stop, str) else tuple(self.stop or ()))
        _require(all(isinstance(text, str) for text in self.stop), "stop", self.stop, "a string or strings")
        put("stop_token_ids", tuple(_whole("stop_token_ids", token_id) for token_id in self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            put(
                "allowed_token_ids", tuple(_whole("allowed_token_ids", token_id) for token_id in self.allowed_token_ids)
            )
        if not isinstance(self.logit_bias or {}, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}, but must be a mapping", param="logit_bias")
        bias = (self.logit_bias or {}).items()
        put("logit_bias", {_whole("logit_bias", i): _number("logit_bias", value) for i, value in bias})


def _whole(name: str, value: object) -> int:
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} has {value!r}, but must have whole numbers", param=name) from None


def _number(name: str, value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        raise RequestError(f"{name} has {value!r}, but must have numbers", param=name)
    return float(value)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value}, but must be {allowed}", param=name)


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sampling parameters of a worker's row, sent once with the row.

    - The random numbers of a position are a pure function of (seed, choice, position, draw).
    - Tokens of `banned_ids` cannot be chosen before there are `min_tokens` output tokens.
    - `bias_values` (float32) are added to the logits of `bias_ids`.
    - If `allowed_ids` is not empty, no other token can be chosen.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    banned_ids: bytes = b""
    num_logprobs: int = -1
    bias_ids: bytes = b""
    bias_values: bytes = b""
    allowed_ids: bytes = b""
