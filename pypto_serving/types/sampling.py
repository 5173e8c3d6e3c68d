"""Sampling parameters of the user, and their part for a worker's row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat

import msgspec

from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Guide
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief, entries, whole

INT32_MAX = 2**31 - 1
MAX_N = 128
"""Limit of choices per prompt."""
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
"""Limits of stop strings per request, and of characters of each."""
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
"""Limit of token ids of a request in each of `logit_bias`, `allowed_token_ids` and `logprob_token_ids`."""
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORD_TOKENS = 128, 128, 1024
"""Limits of bad words per request, of characters of each, and of tokens of all together."""
LOWEST_REPETITION, HIGHEST_REPETITION = 0.01, 100.0
"""Limits of repetition penalties; beyond them, a float32 logit could become infinite or zero."""
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0, 100),
    "top_k": (-1, INT32_MAX),
    "min_p": (0, 1),
    "max_tokens": (0, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, INT32_MAX),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (LOWEST_REPETITION, HIGHEST_REPETITION),
}
_ALLOWED = {name: f"between {low} and {high}" for name, (low, high) in _RANGES.items()} | {
    "top_k": f"0 or -1 (off), or between 1 and {INT32_MAX}",
    "seed": "a 64-bit integer",
    "truncate_prompt_tokens": f"-1 (as many as fit), or between 1 and {INT32_MAX}",
    "repetition_penalty": f"between {LOWEST_REPETITION:g} and {HIGHEST_REPETITION:g}; 1 turns it off",
}
"""The allowed values of each field, in words."""
_ID_LIMITS = {
    "stop_token_ids": (MAX_STOP_IDS, "ids"),
    "logprob_token_ids": (MAX_BIASES, "long"),
    "logit_bias": (MAX_BIASES, "entries long"),
    "allowed_token_ids": (MAX_BIASES, "long"),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request. Validated at construction; raises RequestError that names the field.

    - `temperature`: 0 is greedy.
    - `top_k`, `top_p`: 0 (or -1) and 1 disable the filter.
    - `max_tokens`: None allows output up to the end of the context.
    - `seed`: None draws one at admission.
    - `logprobs` k: return log-probabilities of each output token and of the k most likely ones, from the raw logits.
    - `logprob_token_ids`: with `logprobs`, return those of these tokens instead of the most likely ones.
    - `prompt_logprobs` k: return the same for each token of the prompt except the first.
    - `include_stop_str_in_output`: keep the stop string, or the text of the stop token, in the text.
    - `truncate_prompt_tokens` n: keep the last n tokens of the prompt; -1 keeps as many as fit.
    - `logit_bias`: values added to the logits of token ids.
    - `allowed_token_ids`: only these can be chosen; None allows all.
    - `frequency_penalty`, `presence_penalty`: subtracted from the logits of tokens of the output, for each occurrence
      and once, respectively.
    - `repetition_penalty`: divides positive logits of tokens of prompt and output, multiplies negative ones; 1 is off.
    - `bad_words`: texts that the output must not contain; `bad_word_ids`: forbidden token sequences, including the
      encoded `bad_words`.
    - `structured_outputs`: constraints on the output; a StructuredOutputsParams, or a mapping with its names.
    - `guide`: the grammar of the output and the limit of its reasoning; the API derives it from other fields.
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
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        self._coerce()
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise _refusal(name, value, f"{_ALLOWED[name]} ({_broken_bound(value, low)})")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        limit = self.max_tokens if self.max_tokens is not None else 2**31
        _require(0 <= self.min_tokens <= limit, "min_tokens", self.min_tokens, "between 0 and max_tokens")
        _require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", 0, _ALLOWED["truncate_prompt_tokens"])
        check_stops(self.stop)
        for name, (most, unit) in _ID_LIMITS.items():
            if ids := getattr(self, name):
                _require_at_most(most, name, len(ids), unit)
                _check_ids(name, ids)
        if self.logprob_token_ids and self.logprobs is None:
            raise _refusal("logprob_token_ids", _Words("given"), "left out unless logprobs is given")
        if self.allowed_token_ids == ():
            raise _refusal("allowed_token_ids", _Words("empty"), "at least one token id, or None for all")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise _refusal(f"logit_bias of {token_id}", bias, "between -100 and 100")
        if self.bad_words or self.bad_word_ids:
            self._check_bad_words()

    def _check_bad_words(self) -> None:
        words, name = self.bad_words, "bad_words"
        _require_at_most(MAX_BAD_WORDS, name, len(words), "strings")
        _require(all(word.strip() for word in words), name, words, "strings that are not empty or white space")
        _require_at_most(MAX_BAD_WORD_CHARS, name, max(map(len, words), default=0), "characters long")
        _require(all(self.bad_word_ids), "bad_word_ids", _Words("empty in part"), "sequences of at least one token id")
        num_ids = sum(map(len, self.bad_word_ids))
        hint = ", with and without a space before each word; send fewer or shorter ones"
        _require_at_most(MAX_BAD_WORD_TOKENS, name, num_ids, "tokens long", hint)
        for ids in self.bad_word_ids:
            _check_ids("bad_word_ids", ids)

    def _coerce(self) -> None:
        """Convert lists, numpy numbers and single strings to plain values. Raises RequestError."""
        for name, (plain, read) in _READERS.items():
            value = getattr(self, name)
            if type(value) is plain and (plain not in _CONTAINERS or not value):
                continue
            if value is not None or name not in _OPTIONAL:
                msgspec.structs.force_setattr(self, name, read(name, value))


_ADJUSTING: dict[str, Any] = {
    "logit_bias": {},
    "allowed_token_ids": None,
    "min_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "bad_word_ids": (),
}


def adjusting(params: SamplingParams) -> list[str]:
    """Return the names of given fields that adjust logits."""
    return [name for name, neutral in _ADJUSTING.items() if getattr(params, name) != neutral]


def guiding(params: SamplingParams) -> list[str]:
    """Return the names of given fields that require a guide, and therefore masks."""
    guide = params.guide
    if guide is None:
        return []
    return ["thinking_token_budget" if guide.grammar is None else guide.field]


def check_max_tokens(value: int | None, name: str = "max_tokens", least: int = 0) -> None:
    """Raise RequestError about the field `name` unless `value` is None or a valid number of output tokens."""
    if value is not None and not least <= value <= INT32_MAX:
        raise _refusal(name, value, f"between {least} and {INT32_MAX} ({_broken_bound(value, least)})")


def check_stops(stops: Sequence[str], name: str = "stop") -> None:
    """Raise RequestError about the field `name` if its strings are not valid stop strings."""
    if stops:
        _require_at_most(MAX_STOPS, name, len(stops), "strings", " strings")
        _require(all(stops), name, "", "a string or strings that are not empty")
        _require_at_most(MAX_STOP_CHARS, name, max(map(len, stops)), "characters long")


def check_named_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError if a parameter names a token id outside the vocabulary."""
    fields = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
    named = {name: getattr(params, name) or () for name in fields}
    named["bad_word_ids"] = [token_id for ids in params.bad_word_ids for token_id in ids]
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RequestError(f"{name}: {token_id} is not between 0 and {vocab_size - 1}", param=name)


class _Words(str):
    """Words for a message, written without quotes."""

    __slots__ = ()


def _broken_bound(value: float, low: float) -> str:
    """Return pydantic's word for the bound of a number that is not kept; clients of vLLM look for it."""
    return "greater_than_equal" if value < low else "less_than_equal"


def _refusal(name: str, value: object, allowed: str) -> RequestError:
    """Make the error about a field, or about a place in it such as `stop_token_ids[2]` or `logit_bias of 5`."""
    shown = value if isinstance(value, _Words) else brief(value)
    return RequestError(f"{name} is {shown}, but must be {allowed}", param=name.split(" ")[0].split("[")[0])


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise _refusal(name, value, allowed)


def _require_at_most(limit: int, name: str, count: int, unit: str, hint: str = "") -> None:
    if count > limit:
        raise _refusal(name, _Words(f"{count} {unit}"), f"at most {limit}{hint}")


def _check_ids(name: str, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if not 0 <= token_id <= INT32_MAX:
            message = f"{name} contains {brief(token_id)}, but must have token ids from 0 to {INT32_MAX}"
            raise RequestError(message, param=name)


def _whole(name: str, value: object) -> int:
    try:
        return whole(value)
    except ValueError:
        raise _refusal(name, value, "a whole number") from None


def _is_truth(value: object) -> bool:
    """Return whether `value` is a bool or numpy's, recognized by name since the command line starts without numpy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _number(name: str, value: object) -> float:
    if (
        isinstance(value, str)
        or _is_truth(value)
        or getattr(value, "ndim", 0) > 0
        or not isinstance(value, SupportsFloat)
    ):
        raise _refusal(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _refusal(name, value, "a number that a float can hold") from None
    except (TypeError, ValueError):
        raise _refusal(name, value, "a number") from None


def _switch(name: str, value: object) -> bool:
    if _is_truth(value):
        return bool(value)
    raise _refusal(name, value, "True or False")


def _entries(name: str, value: Any, allowed: str) -> list[Any]:
    """Return the entries of `value`, [] for None. Raises RequestError for a string, bytes or a mapping."""
    try:
        return [] if value is None else entries(value)
    except ValueError:
        raise _refusal(name, value, allowed) from None


def _strings(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _entries(name, value, "a string or a list of strings")
    for text in texts:
        _require(isinstance(text, str), name, value, "a string or a list of strings")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refusal(name, value, "valid Unicode, without lone surrogates") from None
    return tuple(map(str, texts))


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = _entries(name, value, "a list of token ids")
    return tuple(i if type(i) is int else _whole(f"{name}[{at}]", i) for at, i in enumerate(ids))


def _id_lists(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    lists = _entries(name, value, "a list of lists of token ids")
    return tuple(_ids(f"{name}[{at}]", each) for at, each in enumerate(lists))


def _biases(name: str, value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping from token ids to numbers")
    made: dict[int, float] = {}
    for key, number in value.items():
        token_id = key if type(key) is int else _whole(f"{name} key", key)
        made[token_id] = number if type(number) is float else _number(f"{name} of {brief(key)}", number)
    return made


_READERS: dict[str, tuple[type, Callable[[str, Any], Any]]] = {
    name: (plain, read)
    for plain, read, names in (
        (int, _whole, ("n", "top_k", "min_tokens", "max_tokens", "seed", "truncate_prompt_tokens")),
        (int, _whole, ("logprobs", "prompt_logprobs")),
        (float, _number, ("temperature", "top_p", "min_p")),
        (float, _number, ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        (bool, _switch, ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")),
        (tuple, _strings, ("stop", "bad_words")),
        (tuple, _ids, ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")),
        (tuple, _id_lists, ("bad_word_ids",)),
        (dict, _biases, ("logit_bias",)),
        (StructuredOutputsParams, lambda _, value: StructuredOutputsParams.read(value), ("structured_outputs",)),
    )
    for name in names
}
"""The plain type of each field, and the function that converts other values to it."""
_CONTAINERS = {tuple, dict}
_OPTIONAL = {name for name in _READERS if SamplingParams.__annotations__[name].endswith("None")}


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sampling parameters of a worker's row, sent once with the row.

    - The random numbers of a position are a pure function of (seed, choice, position, draw).
    - Tokens of `banned_ids` cannot be chosen before there are `min_tokens` output tokens.
    - `bias_values` (float32) are added to the logits of `bias_ids`.
    - If `logprob_ids` is not empty, return log-probabilities of these tokens instead of the most likely ones.
    - If `allowed_ids` is not empty, no other token can be chosen.
    - `bad_words` are token sequences that the output must not contain.
    - `num_prompt_logprobs`: as `prompt_logprobs` of SamplingParams, -1 for none. The first
      `num_prompt_logprobs_sent` of them were delivered before.
    - `guide`: constraints on the output; `eos_ids`: tokens that end it. Both are empty for most rows.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[bytes, ...] = ()
    num_prompt_logprobs: int = -1
    num_prompt_logprobs_sent: int = 0
    guide: Guide | None = None
    eos_ids: bytes = b""
    logprob_ids: bytes = b""

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens of the row change its logits."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)
