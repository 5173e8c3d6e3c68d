"""Name the forms in which model families write tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pypto_serving.api.chat.dsml import CALLS_END, CALLS_START, INVOKE_END, MARK
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
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools

Read = Callable[[OutputScanner, Tools], Steps[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model that must call writes: `begin`, calls with `between` between them, `end`.

    - A call is `head`, the name, `middle`, the arguments, `tail`.
    - `alone`: a single call needs neither `begin` nor `end`.
    - `starts`: all that begins calls within text, from the parser; `close` may stand behind them.
    - `opens`: what an output begins with that is read as a call without a mark, as a regular expression from the
      parser; "" if there is no such thing. `fences` may stand around calls there.
    - `goes_on`: what behind calls is read as one more, likewise.
    - `marks`: the parts of all these texts that are special tokens in some tokenizers.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Literal["json", "python", "xml", "dsml"] = "json"
    alone: bool = False
    starts: tuple[str, ...] = ()
    close: str = ""
    opens: str = ""
    goes_on: str = ""
    fences: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One form of tool calls.

    - `read`: reads content and calls; it gets the types of the parameters
    - `form`: how calls are written
    - `end_thinking`: beginnings of calls that end the reasoning
    - `short_ids`: ids of calls have 9 letters and digits
    """

    read: Read
    form: CallForm
    end_thinking: tuple[str, ...] = ()
    short_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what outputs hold as special tokens in some tokenizers."""
        return self.form.marks


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_HERMES = CallForm(
    head=f"{hermes.START}\n{_NAME}",
    middle=_ARGUMENTS,
    tail=f"}}\n{hermes.END}",
    between="\n",
    starts=hermes.STARTS,
    marks=(hermes.START, hermes.END),
)
_QWEN3_CODER = CallForm(
    head=f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}",
    middle=">\n",
    tail=f"{qwen3_coder.FUNCTION_END}\n{qwen3_coder.END}",
    between="\n",
    arguments="xml",
    starts=qwen3_coder.STARTS,
    marks=(qwen3_coder.START, qwen3_coder.END),
)
_LLAMA3_JSON = CallForm(
    head=_NAME, middle='", "parameters": ', tail="}", between=f"{llama3_json.SEPARATOR} ",
    starts=llama3_json.STARTS, opens=llama3_json.OPENS, goes_on=llama3_json.GOES_ON, marks=(llama3_json.TAG,),
)  # fmt: skip
_PYTHONIC = CallForm(
    head="", middle="(", tail=")", begin="[", between=", ", end="]", arguments="python",
    starts=pythonic.STARTS, close=pythonic.END, opens=pythonic.OPENS, marks=(pythonic.START, pythonic.END),
)  # fmt: skip
_MISTRAL_MARKS = (mistral.MARK, mistral.ARGS, mistral.CALL_ID)
_MISTRAL = CallForm(
    head=_NAME, middle=_ARGUMENTS, tail="}", begin=f"{mistral.MARK}[", between=", ", end="]",
    starts=mistral.STARTS, marks=_MISTRAL_MARKS,
)  # fmt: skip
_MISTRAL_NAMED = CallForm(head=mistral.MARK, middle=mistral.ARGS, tail="", starts=mistral.STARTS, marks=_MISTRAL_MARKS)
_V3_MARKS = (
    deepseek_v3.CALLS,
    deepseek_v3.CALLS_END,
    deepseek_v3.CALL,
    deepseek_v3.CALL_END,
    deepseek_v3.SEPARATOR,
)
_DEEPSEEK_V3 = CallForm(
    head=f"{deepseek_v3.CALL}function{deepseek_v3.SEPARATOR}",
    middle=f"\n{deepseek_v3.FENCE}\n",
    tail=f"\n{deepseek_v3.FENCE_END}{deepseek_v3.CALL_END}",
    begin=deepseek_v3.CALLS,
    between="\n",
    end=deepseek_v3.CALLS_END,
    starts=deepseek_v3.STARTS,
    marks=_V3_MARKS,
)
_DEEPSEEK_V31 = CallForm(
    head=deepseek_v3.CALL,
    middle=deepseek_v3.SEPARATOR,
    tail=deepseek_v3.CALL_END,
    begin=deepseek_v3.CALLS,
    end=deepseek_v3.CALLS_END,
    starts=deepseek_v3.STARTS,
    marks=_V3_MARKS,
)
_DEEPSEEK_V4 = CallForm(
    head=f'<{MARK}invoke name="',
    middle='">\n',
    tail=f"{INVOKE_END}\n",
    begin=f"{CALLS_START}\n",
    end=CALLS_END,
    arguments="dsml",
    starts=deepseek_v4.STARTS,
    marks=(MARK,),
)
_JSON = CallForm(
    head=_NAME, middle=_ARGUMENTS, tail="}", begin="[", between=", ", end="]", alone=True,
    opens=json_text.OPENS,
    fences=((f"{json_text.FENCE}\n", f"\n{json_text.FENCE_END}"),),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "hermes": Family(hermes.read, _HERMES),
    "qwen3_coder": Family(qwen3_coder.read, _QWEN3_CODER, end_thinking=(qwen3_coder.BEGINNING,)),
    "llama3_json": Family(llama3_json.read, _LLAMA3_JSON),
    "pythonic": Family(pythonic.read, _PYTHONIC),
    "mistral": Family(mistral.read, _MISTRAL, short_ids=True),
    "mistral_named": Family(mistral.read, _MISTRAL_NAMED, short_ids=True),
    "deepseek_v3": Family(deepseek_v3.read, _DEEPSEEK_V3),
    "deepseek_v31": Family(deepseek_v3.read, _DEEPSEEK_V31),
    "deepseek_v4": Family(deepseek_v4.read, _DEEPSEEK_V4),
    "json": Family(json_text.read, _JSON),
}
"""By the names of `--tool-call-parser`."""
