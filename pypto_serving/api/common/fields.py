"""Screen request fields that the schemas lack: refuse, accept or report them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pypto_serving.errors import RequestError
from pypto_serving.util import brief, one_of

IGNORED_HEADER = "x-ignored-fields"
MAX_IGNORED, MAX_NAME_CHARS = 32, 64
"""Ignored fields of a request that are named, and characters of each name; the others are only counted."""


class IgnoredFields(msgspec.Struct, frozen=True):
    """Unknown fields of a body: the beginnings of the first names, and how many more there are."""

    names: list[str]
    num_more: int

    @classmethod
    def of(cls, names: list[str]) -> IgnoredFields:
        return cls([name[:MAX_NAME_CHARS] for name in names[:MAX_IGNORED]], max(0, len(names) - MAX_IGNORED))

    def header(self) -> dict[str, str]:
        """Make the response header that lists them, in characters that a header may hold."""
        if not self.names:
            return {}
        names = [re.sub(r"[^\w.\-\[\]]", "?", name, flags=re.ASCII) for name in self.names]
        more = [f"and {self.num_more} more"] if self.num_more else []
        return {IGNORED_HEADER: ", ".join(names + more)}


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Rules for the fields of one endpoint.

    - `neutral`: unsupported fields; only the values listed, and null, are accepted, since they change nothing.
    - `accepted`: fields without an effect; any value is accepted.
    """

    neutral: Mapping[str, tuple[Any, ...]]
    accepted: frozenset[str]

    def screen(self, extra: Mapping[str, Any], prefix: str = "") -> list[str]:
        """Return the unknown names in `extra`. Raises RequestError if an unsupported field is not neutral."""
        unknown = []
        for name, value in extra.items():
            if name in self.neutral:
                _require_neutral(prefix + name, value, self.neutral[name])
            elif name not in self.accepted:
                unknown.append(prefix + name)
        return unknown


def _require_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value is None or any(value == allowed and _is_truth(value) == _is_truth(allowed) for allowed in neutral):
        return
    if name in _SUCCESSORS:
        message = f"{name} is not supported by this server: it is the old form of {_SUCCESSORS[name]}; send that"
        raise RequestError(message, param=name, code="unsupported_field")
    advice = f"leave it out or set it to {one_of([*map(json.dumps, neutral)])}" if neutral else "leave it out"
    raise RequestError(
        f"{name} = {brief(value)} is not supported by this server; {advice}",
        param=name,
        code="unsupported_field",
    )


def _is_truth(value: Any) -> bool:
    """Return whether `value` is true or false, which Python takes for 1 and 0."""
    return isinstance(value, bool)


_SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}
_NEUTRAL_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "kv_transfer_params": ({},),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "store": (False,),
}

_ACCEPTED_EVERYWHERE = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "spaces_between_special_tokens",
    }
)
"""`spaces_between_special_tokens`: the tokenizers of the served families put none there."""

COMPLETION_RULES = FieldRules({**_NEUTRAL_EVERYWHERE, "suffix": ("",), "prompt_embeds": ()}, _ACCEPTED_EVERYWHERE)

CHAT_RULES = FieldRules(
    {
        **_NEUTRAL_EVERYWHERE,
        "best_of": (1,),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    },
    _ACCEPTED_EVERYWHERE,
)


TOKENIZE_RULES = FieldRules({"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}, frozenset())
DETOKENIZE_RULES = FieldRules({}, frozenset())


@functools.cache
def chat_rules(supported: frozenset[str]) -> FieldRules:
    """Return CHAT_RULES for a chat encoder that reads the fields `supported`."""
    neutral = {name: values for name, values in CHAT_RULES.neutral.items() if name not in supported}
    return FieldRules(neutral, CHAT_RULES.accepted | supported)


STREAM_OPTION_RULES = FieldRules({}, frozenset({"include_obfuscation"}))
