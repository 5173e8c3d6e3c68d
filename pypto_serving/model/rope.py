"""Rotary position embeddings (RoPE) and their context extensions, equal to those of `transformers`. Torch-free.

RoPE: Su et al. 2021, arXiv:2104.09864. YaRN: Peng et al. 2023, arXiv:2309.00071. LongRoPE: Ding et al. 2024,
arXiv:2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pypto_serving.model.fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "none"]
"""`none` leaves heads as they are; the others are `rope_type` in config.json."""
Tables = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Cosines and sines."""

Kind = TypeVar("Kind")

_PIECE = 4096
"""Positions whose angles are computed at once."""
_MOST_FACTOR = 1 << 20
"""Limit of the extension factor of a context."""
_TRAINED, _GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"
_PART = "partial_rotary_factor"
_READ: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", _TRAINED, "attention_factor", "attn_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", _GROWTH),
    ),
    "llama3": ("factor", _TRAINED, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", _TRAINED, "attention_factor", "short_factor", "long_factor"),
}
"""The keys that a kind of RoPE reads, beside `_READ_BY_ALL`."""
_READ_BY_ALL = (
    *("rope_type", "type", "rope_theta", _PART, "max_position_embeddings"),
    *("mrope_section", "mrope_interleaved"),
)
"""Keys that every kind reads; those of mrope change nothing in text, where all sections have the same positions."""
_READ_BY_SOME = set[str]().union(*_READ.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The RoPE of a model. Lengths are in tokens; `trained_len` is the context before extension.

    dim: the dimensions that are rotated, the first of each head.
    attention_factor: scales cosines and sines (YaRN, LongRoPE); it is 1 for every other kind.
    short_factors, long_factors: divisors of the frequencies of LongRoPE.
    query_growth: queries at position p are multiplied by 1 + query_growth * log(1 + floor(p / trained_len)).
    unread: keys of config.json that other kinds read, and this one does not.
    """

    kind: RopeKind
    dim: int
    theta: float
    trained_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_growth: float = 0.0
    unread: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Fields, head_dim: int, max_position_embeddings: int, in_part: bool = False) -> Self:
        """Read `rope_scaling`, else `rope_parameters`; a missing `rope_theta` is beside them. Raises ModelError.

        `in_part`: whether the architecture may rotate a part of each head. Of others, `transformers` ignores
        `partial_rotary_factor` where the type is default, and fails with the other types.
        """
        scaling = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
        given = scaling.get("rope_type", "type") or "default"
        kind = cast(RopeKind, "default" if given == "mrope" else given)
        scaling.require(kind in [*_READ], "rope_type", kind, f"one of {', '.join(_READ)}")
        dim, ignored = _rotated_dims(scaling, config, head_dim), tuple[str, ...]()
        if dim < head_dim and not in_part:
            scaling.require(kind == "default", _PART, dim / head_dim, "1: this architecture rotates whole heads")
            dim, ignored = head_dim, (f"{_PART} {dim / head_dim}",)
        theta = scaling.positive_float("rope_theta", default=config.positive_float("rope_theta", default=10000.0))
        scaling.require(theta > 1, "rope_theta", theta, "a number above 1")
        max_len, read = max_position_embeddings, _READ[kind]
        trained = max_len
        if _TRAINED in read:
            trained = (scaling if config.get(_TRAINED) is None else config).positive_int(_TRAINED, default=max_len)
        implied = kind in ("yarn", "longrope") and scaling.get("factor") is None
        factor = _factor(scaling) if "factor" in read and not implied else max_len / trained
        values: dict[str, Any] = {}
        if kind == "yarn":
            values = {
                "attention_factor": _yarn_attention_factor(scaling, factor),
                "beta_fast": scaling.positive_float("beta_fast", default=32.0),
                "beta_slow": scaling.positive_float("beta_slow", default=1.0),
                "truncate": scaling.flag("truncate", True),
                "query_growth": scaling.positive_float(_GROWTH) if scaling.get(_GROWTH) else 0.0,
            }
        elif kind == "longrope":
            usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
            values = {
                "attention_factor": scaling.positive_float("attention_factor", default=usual),
                "short_factors": _divisors(scaling, "short_factor", dim // 2),
                "long_factors": _divisors(scaling, "long_factor", dim // 2),
            }
        elif kind == "dynamic":
            scaling.require(dim > 2, "rope_type", kind, "another, where 2 dimensions of a head are rotated")
        elif kind == "llama3":
            low, high = scaling.positive_float("low_freq_factor"), scaling.positive_float("high_freq_factor")
            scaling.require(low < high, "high_freq_factor", high, f"above low_freq_factor, {low}")
            values = {"low_freq_factor": low, "high_freq_factor": high}
        return cls(
            kind=kind,
            dim=dim,
            theta=theta,
            trained_len=trained,
            factor=factor,
            unread=ignored + _unread(scaling, kind),
            **values,
        )

    @property
    def max_len(self) -> int:
        """Return the longest sequence for which the frequencies were extended, unless config.json does."""
        return self.trained_len if self.kind == "llama3" else int(self.trained_len * self.factor)

    def frequencies(self, max_model_len: int) -> NDArray[np.float32]:
        """Compute the inverse frequencies, float32 [dim / 2].

        Every operation rounds to float32 in the order of `transformers`. An angle is a frequency times a position, so
        one differing bit becomes a visible rotation at the end of a long sequence. With frequencies rounded once,
        logits differed from those of `transformers` by up to 5e-4 instead of 1e-5.

        Dynamic NTK scaling and LongRoPE in `transformers` follow the longest sequence of a batch. Here they follow
        `max_model_len`: a request's answer must not depend on other requests or on its own length. LongRoPE takes the
        long factors if this exceeds `trained_len`.
        """
        if self.kind == "none":
            return np.zeros(self.dim // 2, np.float32)
        theta = self.theta
        if self.kind == "dynamic" and max_model_len > self.trained_len:
            growth = self.factor * max_model_len / self.trained_len - (self.factor - 1)
            theta *= growth ** (self.dim / (self.dim - 2))
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        periods = np.power(np.float32(theta), exponent, dtype=np.float64).astype(np.float32)
        one, factor = np.float32(1), np.float32(self.factor)
        if self.kind == "linear":
            return one / periods / factor
        if self.kind == "llama3":
            return self._llama3_frequencies(one / periods)
        if self.kind == "yarn":
            kept = self._yarn_extrapolated()
            return one / (factor * periods) * (one - kept) + one / periods * kept
        if self.kind == "longrope":
            factors = self.long_factors if max_model_len > self.trained_len else self.short_factors
            return one / (np.asarray(factors, np.float32) * periods)
        return one / periods

    def _llama3_frequencies(self, frequencies: NDArray[np.float32]) -> NDArray[np.float32]:
        """Divide slow rotations by `factor`, keep fast ones, and interpolate between them: Llama 3.1's extension."""
        one, factor = np.float32(1), np.float32(self.factor)
        wavelengths = np.float32(2 * math.pi) / frequencies
        low, high = (np.float32(each) for each in (self.low_freq_factor, self.high_freq_factor))
        trained = np.float32(self.trained_len)
        kept = (trained / wavelengths - low) / np.float32(self.high_freq_factor - self.low_freq_factor)
        between = (one - kept) * (frequencies / factor) + kept * frequencies
        slow, fast = wavelengths > trained / low, wavelengths < trained / high
        return np.where(slow, frequencies / factor, np.where(fast, frequencies, between)).astype(np.float32)

    def _yarn_extrapolated(self) -> NDArray[np.float32]:
        """Return the YaRN ramp: how much of each frequency is kept, 1 for fast rotations, 0 for slow."""

        def dimension(rotations: float) -> float:
            turns = math.log(self.trained_len / (rotations * 2 * math.pi))
            return self.dim * turns / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        return np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))

    @property
    def position_bytes(self) -> int:
        """Return the bytes per position of both tables, and of those of queries if they differ."""
        return (4 if self.query_growth else 2) * (self.dim // 2) * 4

    def tables(self, max_model_len: int) -> Tables:
        """Compute cosines and sines, float32 [max_model_len, dim / 2] each, times `attention_factor`."""
        frequencies, factor = self.frequencies(max_model_len), np.float32(self.attention_factor)
        cos, sin = (np.empty((max_model_len, len(frequencies)), np.float32) for _ in range(2))
        for start in range(0, max_model_len, _PIECE):
            rows = slice(start, min(start + _PIECE, max_model_len))
            angles = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * frequencies
            for table, function in ((cos, np.cos), (sin, np.sin)):
                function(angles, out=table[rows])
                table[rows] *= factor
        return cos, sin

    def query_factors(self, max_model_len: int) -> NDArray[np.float32] | None:
        """Compute the factors of queries by position, float32 [max_model_len, 1]; None if they are 1."""
        if not self.query_growth:
            return None
        turns = np.arange(max_model_len, dtype=np.float32)[:, None] / np.float32(self.trained_len)
        return np.float32(1) + np.float32(self.query_growth) * np.log(np.float32(1) + np.floor(turns))


def _rotated_dims(scaling: Fields, config: Fields, head_dim: int) -> int:
    """Read how many dimensions of a head are rotated; absent means all."""
    source = config if scaling.get(_PART) is None else scaling
    part = source.positive_float(_PART, default=1.0)
    dim = int(head_dim * part)
    source.require(2 <= dim <= head_dim and dim % 2 == 0, _PART, part, f"an even part of head_dim, {head_dim}")
    return dim


def _divisors(scaling: Fields, key: str, count: int) -> tuple[float, ...]:
    """Read `count` divisors of frequencies."""
    values = scaling.get(key)
    numbers = isinstance(values, list) and all(isinstance(v, int | float) and 1e-6 < v < 1e9 for v in values)
    scaling.require(numbers and len(values) == count, key, values, f"{count} positive numbers")
    return tuple(map(float, values))


def _factor(scaling: Fields) -> float:
    factor = scaling.positive_float("factor")
    scaling.require(1 <= factor <= _MOST_FACTOR, "factor", factor, f"at least 1, and at most {_MOST_FACTOR}")
    return factor


def _unread(scaling: Fields, kind: RopeKind) -> tuple[str, ...]:
    """Name the keys that only other kinds read. Raises ModelError for a key of unknown meaning with a number."""
    left = {key: value for key, value in scaling.values.items() if key not in (*_READ_BY_ALL, *_READ[kind])}
    for key, value in left.items():
        grows = key == _GROWTH and bool(value)
        harmless = (key in _READ_BY_SOME and not grows) or value is None or isinstance(value, bool | str)
        scaling.require(harmless or value == 1, key, value, f"absent: RoPE of type {kind} does not read it here")
    return tuple(f"{key} {value}" for key, value in left.items() if key in _READ_BY_SOME and value not in (None, 1))


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """Read the scale of cosines and sines; `attn_factor` multiplies the usual one, as in vLLM and llama.cpp."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling.positive_float("attention_factor")
    own = scaling.positive_float("attn_factor", default=1.0)
    mscale, mscale_all_dim = (scaling.get(key) and scaling.positive_float(key) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return own * magnitude(mscale) / magnitude(mscale_all_dim)
    return own * magnitude(1.0)


def rope_tables(ropes: Mapping[Kind, Rope], max_model_len: int) -> dict[Kind, Tables]:
    """Compute `Rope.tables` of each kind of layer. Kinds with the same RoPE share them."""
    tables = {rope: rope.tables(max_model_len) for rope in set(ropes.values())}
    return {kind: tables[rope] for kind, rope in ropes.items()}
