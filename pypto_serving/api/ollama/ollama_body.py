"""Read the bodies of POST /api/chat and /api/generate as OpenAI's. Errors name the fields of those."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from pypto_serving.api.chat.tools import EFFORTS, refuse
from pypto_serving.api.common.body import MAX_MESSAGES, Body, FieldRules, ReadBody, parse_json
from pypto_serving.api.common.described import OBJECT, TEXT, list_of, or_null
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.sampling import INT32_MAX
from pypto_serving.util import brief

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty")
_OPTIONS = (*_FLOATS, "top_k", "seed", "stop")
"""Options that OpenAI and vLLM have under the same name, or the one in _RENAMED."""
_RENAMED = {"repeat_penalty": "repetition_penalty"}
_OF_MACHINES = frozenset({"num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "main_gpu", "use_mmap", "numa"})
"""Options that say how Ollama runs a model; here the server's own do."""
FORMAT = or_null({"const": "json"}, OBJECT, {"const": ""})
THINK = or_null({"type": "boolean"}, {"enum": list(EFFORTS)})


class OllamaBody(Body):
    """What both endpoints read."""

    model: str | None = None
    stream: bool | None = None
    format: Annotated[Any, FORMAT] = None
    think: Annotated[Any, THINK] = None
    options: dict[str, Any] | None = None


_ACCEPTED = frozenset({"keep_alive", "shift", "truncate"})


class OllamaChatBody(OllamaBody):
    """The body of POST /api/chat."""

    rules: ClassVar[FieldRules] = FieldRules(accepted=_ACCEPTED)

    messages: Annotated[list[Any] | None, or_null(list_of(OBJECT))] = Field(
        None, fail_fast=True, max_length=MAX_MESSAGES
    )
    tools: Annotated[Any, or_null(list_of(OBJECT))] = None


class OllamaGenerateBody(OllamaBody):
    """The body of POST /api/generate."""

    rules: ClassVar[FieldRules] = FieldRules({"suffix": ("",), "template": ("",)}, _ACCEPTED | {"context"})
    """`context` is what an earlier answer gave to go on from; none here does."""

    prompt: str | None = None
    system: str | None = None
    images: Annotated[list[Any] | None, or_null(list_of(TEXT))] = None
    raw: bool | None = None


def without_tag(name: str | None) -> str | None:
    """Return the name of a model without Ollama's tag for its newest version."""
    return None if name is None else name.removesuffix(":latest")


Read = Callable[[Prompter, ServingConfig, bytes], ReadBody]
"""Reads a body of OpenAI's chats, or of its completions."""


def read_ollama_chat(read_chat: Read, prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Read a chat with `read_chat`. Raises RequestError."""
    body = parse_json(raw, OllamaChatBody)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
    answer_calls(messages)
    said = {"messages": messages, "tools": body.tools, **_thinking(body.think)}
    return _read(read_chat, prompter, serving, body, said)


def read_ollama_generate(
    read_chat: Read, read_completion: Read, prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray
) -> ReadBody:
    """Read a prompt, which becomes a chat unless it is `raw`. Raises RequestError."""
    body = parse_json(raw, OllamaGenerateBody)
    if body.raw:
        if body.images:
            refuse("images", "is given, but this model reads only text; leave it out", "unsupported_content")
        unused = [name for name in ("system", "think") if getattr(body, name) not in (None, "")]
        asked = {"prompt": body.prompt or "", "max_tokens": INT32_MAX}
        return _read(read_completion, prompter, serving, body, asked, unused)
    said = {"role": "user", "content": body.prompt or "", "images": body.images}
    system = [{"role": "system", "content": body.system}] if body.system else []
    asked = {"messages": [*system, _message(said, "prompt")], **_thinking(body.think)}
    return _read(read_chat, prompter, serving, body, asked)


def _read(
    reads: Read,
    prompter: Prompter,
    serving: ServingConfig,
    body: OllamaBody,
    said: dict[str, Any],
    unused: Sequence[str] = (),
) -> ReadBody:
    """Read what OpenAI's endpoint would get. An output ends with the context, if that is before `num_predict`.

    `unused` are fields without effect.
    """
    options, ignored = _sampling(body.options or {})
    fields = {"model": without_tag(body.model), "stream": body.stream is not False, **said, **options}
    if body.format not in (None, ""):
        fields["response_format"] = _format(body.format)
    cutting = msgspec.structs.replace(serving, strict_max_tokens=False)
    read = reads(prompter, cutting, msgspec.json.encode(fields))
    return msgspec.structs.replace(read, ignored=read.ignored.and_also([*body.unknown_fields(), *unused, *ignored]))


def _sampling(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that `options` mean, and the names of those that mean nothing here."""
    fields: dict[str, Any] = {}
    ignored = []
    for name, value in options.items():
        if value is None or name in _OF_MACHINES:
            continue
        if name == "num_predict" and type(value) is int:
            fields |= {"max_tokens": value} if value > 0 else {}
        elif name in _OPTIONS:
            number = _float(value, name) if name in _FLOATS and type(value) is int else value
            fields[_RENAMED.get(name, name)] = number
        else:
            ignored.append(f"options.{name}")
    return fields, ignored


def _float(value: int, name: str) -> float:
    try:
        return float(value)
    except OverflowError:
        refuse(f"options.{name}", "is an integer out of range; send a smaller number")


def _format(wanted: Any) -> dict[str, Any]:
    if wanted == "json":
        return {"type": "json_object"}
    if not isinstance(wanted, Mapping):
        refuse("format", f"is {brief(wanted)}, but must be 'json' or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}


def _thinking(think: Any) -> dict[str, Any]:
    """Return what turns reasoning on or off, under both names that templates have."""
    if think is None:
        return {}
    if not isinstance(think, bool) and think not in EFFORTS:
        refuse("think", f"is {brief(think)}, but must be true, false or one of {', '.join(EFFORTS)}")
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think, "thinking": think}}
    return {"reasoning_effort": think}


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return a message of OpenAI's chats."""
    if not isinstance(message, Mapping):
        refuse(where, f"is {brief(message)}, but must be a message with role and content")
    made = {"role": message.get("role"), "content": message.get("content") or ""}
    if images := message.get("images"):
        if not isinstance(images, list):
            refuse(f"{where}.images", f"is {brief(images)}, but must be a list")
        made["content"] = [{"type": "text", "text": made["content"]}, {"type": "image_url"}]
    if message.get("thinking") is not None:
        made["reasoning"] = message["thinking"]
    if message.get("tool_calls"):
        made["tool_calls"] = message["tool_calls"]
    for name in ("tool_name", "tool_call_id"):
        if message.get(name) is not None:
            made[name] = message[name]
    return made


def answer_calls(messages: list[dict[str, Any]]) -> None:
    """Give ids to calls, and to each result that of the earliest call of its tool that has none."""
    waiting = _Waiting()
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls):
            named = [{"id": f"call{place:04}{i}", "type": "function", **call} for i, call in enumerate(calls)]
            message["tool_calls"] = named
            for call in named:
                waiting.add(call["id"], _name_of(call))
        if message["role"] == "tool":
            found = waiting.take(message.get("tool_call_id"), message.get("tool_name"))
            if found is not None:
                message.pop("tool_name", None)
                message |= {"tool_call_id": found[0], "name": found[1]}


class _Waiting:
    """Calls without results, in their order."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, tuple[Any, Any]] = OrderedDict()  # a plain dict looks slowly for its first
        self._places: dict[str, deque[int]] = {}
        self._num_added = 0

    def add(self, call_id: Any, name: Any) -> None:
        place, self._num_added = self._num_added, self._num_added + 1
        self._calls[place] = (call_id, name)
        for key in (f"id {call_id}", f"name {name}"):
            self._places.setdefault(key, deque()).append(place)

    def take(self, call_id: Any, name: Any) -> tuple[Any, Any] | None:
        """Remove the first call with this id, else with this name, else any; return its id and name."""
        places: Iterable[int] = ()
        if call_id:
            places = self._unanswered(f"id {call_id}")
        elif name is not None:
            places = self._unanswered(f"name {name}")
        place = next(iter(places), next(iter(self._calls), None))
        return None if place is None else self._calls.pop(place)

    def _unanswered(self, key: str) -> Iterable[int]:
        places = self._places.get(key, deque())
        while places and places[0] not in self._calls:
            places.popleft()
        return places


def _name_of(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None
