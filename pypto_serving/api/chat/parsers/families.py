"""Name the forms in which model families write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pypto_serving.api.chat.dsml import MARK
from pypto_serving.api.chat.parsers import (
    deepseek_v3,
    deepseek_v4,
    hermes,
    json_text,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from pypto_serving.api.chat.parsers.tape import Steps, Tape, Tools

Read = Callable[[Tape, Tools], Steps[None]]


@dataclass(frozen=True, slots=True)
class Family:
    """One form of tool calls.

    - `read`: reads content and calls; it gets the types of the parameters
    - `marks`: what outputs hold as special tokens in some tokenizers
    - `end_thinking`: beginnings of calls that end the reasoning
    - `short_ids`: ids of calls have 9 letters and digits
    """

    read: Read
    marks: tuple[str, ...] = ()
    end_thinking: tuple[str, ...] = ()
    short_ids: bool = False


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(hermes.read, (hermes.START, hermes.END)),
    "qwen3_coder": Family(
        qwen3_coder.read, (qwen3_coder.START, qwen3_coder.END), end_thinking=(qwen3_coder.BEGINNING,)
    ),
    "llama3_json": Family(llama3_json.read, (llama3_json.TAG,)),
    "pythonic": Family(pythonic.read, (pythonic.START, pythonic.END)),
    "mistral": Family(mistral.read, (mistral.MARK, "[ARGS]", "[CALL_ID]"), short_ids=True),
    "deepseek_v3": Family(
        deepseek_v3.read,
        (
            deepseek_v3.CALLS,
            deepseek_v3.CALLS_END,
            deepseek_v3.CALL,
            deepseek_v3.CALL_END,
            deepseek_v3.SEPARATOR,
        ),
    ),
    "deepseek_v4": Family(deepseek_v4.read, (MARK,)),
    "json": Family(json_text.read),
}
"""By the names of `--tool-call-parser`."""
