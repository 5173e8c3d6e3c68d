"""Read a request's tools: the functions that the model may call, and whether it must call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

from pypto_serving.api.chat.leaving_out import LeftOut
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

MAX_TOOLS, MAX_NAME_CHARS, MAX_DEPTH = 1024, 128, 64
"""Limits: tools per request, characters per tool name, nesting levels per schema."""
MAX_HOPS = 8
"""Longest chain of `$ref`s that is followed to the parameters of a tool."""
NAME = re.compile(r"[\w.:/-]+")
_FORM = "{'type': 'function', 'function': {'name': ...}}"
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    - `functions`: OpenAI's function objects, which the prompt describes
    - `forced`: the output must consist of calls of functions with these names; () if the model decides
    - `parallel`: an output may contain several calls
    """

    functions: Sequence[Mapping[str, Any]] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    def described(self) -> list[dict[str, Any]]:
        """Return the tools for the prompt, without `strict`, which concerns only the server."""
        kept = [{key: value for key, value in f.items() if key != "strict"} for f in self.functions]
        return [{"type": "function", "function": function} for function in kept]


def read_tool_use(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolUse:
    """Read OpenAI's `tools` and `tool_choice`. Raises RequestError that names the field at fault."""
    functions = read_tools(tools, "tools")
    names = check_names(functions, "tools")
    mode, allowed, is_named = _read_choice(tool_choice)
    return choose_tools(functions, names, mode, allowed, parallel is not False and not is_named)


def choose_tools(
    functions: Sequence[Mapping[str, Any]], names: Sequence[str], mode: str, allowed: Mapping[str, Any], parallel: bool
) -> ToolUse:
    """Apply `mode`, one of MODES, to functions with these `names`. Raises RequestError that names the field at fault.

    `allowed` maps fields of the request to the function names there; {} allows all functions.
    """
    for place, name in allowed.items():
        if name not in names:
            refuse(place, f"is {brief(name)}, but the names in tools are {brief(names) if names else 'none'}")
    if mode == "required" and not functions:
        refuse("tool_choice", "needs a call, but there are no tools; send tools, or choose 'auto'")
    if mode == "none":
        return ToolUse()
    chosen = tuple(dict.fromkeys(allowed.values()))
    if mode == "auto":
        return ToolUse([f for f in functions if not chosen or f["name"] in chosen], (), parallel)
    return ToolUse(functions, chosen or tuple(names), parallel)


def _read_choice(choice: Any) -> tuple[str, dict[str, str], bool]:
    """Return the mode, the listed function names by field, and whether the choice names a single function."""
    if choice is None or (isinstance(choice, str) and choice in MODES):
        return choice or "auto", {}, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        where = "tool_choice.function"
        return "required", {f"{where}.name": _name(choice.get("function"), where)}, True
    listed = choice.get("allowed_tools") if kind == "allowed_tools" else None
    if (
        isinstance(listed, dict)
        and listed.get("mode") in ("auto", "required")
        and isinstance(listed.get("tools"), list)
    ):
        where = "tool_choice.allowed_tools.tools"
        places = {f"{where}[{i}].function": entry for i, entry in enumerate(listed["tools"][: MAX_TOOLS + 1])}
        names = {
            f"{place}.name": _name(entry.get("function") if isinstance(entry, dict) else None, place)
            for place, entry in places.items()
        }
        if not 0 < len(names) <= MAX_TOOLS:
            refuse(where, f"has {len(listed['tools'])} tools, but must have between 1 and {MAX_TOOLS}")
        return str(listed["mode"]), names, False
    forms = f"{', '.join(map(repr, MODES))}, {_FORM}, or an object of type 'allowed_tools' with mode and tools"
    refuse("tool_choice", f"is {brief(choice)}, but must be one of {forms}")


def read_tools(tools: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the function objects of OpenAI's `tools`. Raises RequestError."""
    functions = []
    for i, tool in enumerate(list_of_tools(tools, where, _FORM)):
        functions.append(read_function(tool, f"{where}[{i}]"))
        check_function(functions[i], f"{where}[{i}].function", "parameters")
    return functions


def list_of_tools(tools: Any, where: str, form: str) -> list[Any]:
    """Return `tools`, or [] for None. Raises RequestError unless it is a list of at most MAX_TOOLS."""
    if not isinstance(tools, list | None):
        refuse(where, f"is {brief(tools)}, but must be a list of {form}")
    if tools and len(tools) > MAX_TOOLS:
        refuse(where, f"has {len(tools)} tools, but must have at most {MAX_TOOLS}")
    return tools or []


def check_function(function: Mapping[str, Any], where: str, schema_field: str, needs_schema: bool = False) -> None:
    """Check a function's description, schema and `strict`. Raises RequestError that names the field at fault."""
    description, schema, strict = (function.get(name) for name in ("description", schema_field, "strict"))
    if not isinstance(description, str | None):
        refuse(f"{where}.description", f"is {brief(description)}, but must be a string")
    if not isinstance(schema, dict) and (needs_schema or schema is not None):
        refuse(f"{where}.{schema_field}", f"is {brief(schema)}, but must be a JSON schema, which is an object")
    if not isinstance(strict, bool | None):
        refuse(f"{where}.strict", f"is {brief(strict)}, but must be true or false")
    if not is_shallow(schema, MAX_DEPTH):
        refuse(f"{where}.{schema_field}", f"has more than {MAX_DEPTH} levels; nest less")


def check_names(functions: Sequence[Mapping[str, Any]], where: str, field: str = "function.name") -> list[str]:
    """Return the names of functions, which were sent as `field` of the tools at `where`.

    Raises RequestError for an invalid name, or one that two functions have.
    """
    places: dict[str, str] = {}
    for i, function in enumerate(functions):
        name, place = function["name"], f"{where}[{i}].{field}"
        if len(name) > MAX_NAME_CHARS or not NAME.fullmatch(name):
            allowed = f"at most {MAX_NAME_CHARS} letters, digits and characters of _-.:/"
            refuse(place, f"is {brief(name)}, but must have {allowed}")
        if name in places:
            refuse(place, f"is {brief(name)} like {places[name]}; give each tool a name of its own")
        places[name] = place
    return list(places)


def read_function(entry: Any, where: str) -> Mapping[str, Any]:
    """Return the function object of a tool or of a call. Raises RequestError."""
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or entry.get("type", "function") != "function":
        refuse(where, f"is {brief(entry)}, but must be {{'type': 'function', 'function': {{...}}}}")
    _name(function, f"{where}.function")
    return function


def read_calls(message: Mapping[str, Any], where: str) -> list[tuple[Mapping[str, Any], dict[str, Any] | str]]:
    """Return each call of a message with its arguments, as `object_in` returns them. Raises RequestError."""
    calls, read = message.get("tool_calls"), []
    if not isinstance(calls, list | None):
        form = "{'id': ..., 'function': {'name': ..., 'arguments': ...}}"
        refuse(f"{where}.tool_calls", f"is {brief(calls)}, but must be a list of {form}")
    for i, call in enumerate(calls or ()):
        place = f"{where}.tool_calls[{i}]"
        arguments = read_function(call, place).get("arguments")
        if not isinstance(arguments, str | dict | None):
            refuse(f"{place}.function.arguments", f"is {brief(arguments)}, but must be a JSON object, as text")
        read.append((call, object_in(arguments) if isinstance(arguments, str) else arguments or {}))
    return read


def object_in(text: str) -> dict[str, Any] | str:
    """Parse a JSON object; empty text is {}. Return other text unchanged: a model may have written it."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def as_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Return arguments for a prompt that can only show an object: text becomes the only argument `arguments`."""
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def refuse(where: str, complaint: str, code: str | None = None) -> NoReturn:
    """Raise RequestError about the field `where`."""
    raise RequestError(f"{where} {complaint}", param=where, code=code)


def string_in(given: Mapping[str, Any], field: str, where: str) -> str:
    """Return the string in `field` of `given`, the object at `where`. Raises RequestError if it is not a string."""
    value = given.get(field)
    if not isinstance(value, str):
        refuse(f"{where}.{field}", "is missing; send a string" if value is None else f"is {brief(value)}, not a string")
    return value


def text_of(content: Any, where: str, fields: Mapping[str, str], left_out: LeftOut | None = None) -> str:
    """Return a content's text: the string itself, or its parts joined by line breaks. Raises RequestError.

    `fields` maps each type of part to the field that contains its text. `left_out` replaces other parts.
    """
    if isinstance(content, str):
        return content
    if content is None:
        refuse(where, "is missing; send a string or parts", "missing_field")
    if not isinstance(content, list):
        refuse(where, f"is {brief(content)}, but must be a string or a list of parts")
    return "\n".join(part_text(part, f"{where}[{i}]", fields, left_out) for i, part in enumerate(content))


def with_joined_texts(message: Mapping[str, Any], separator: str = "\n") -> dict[str, Any]:
    """Return a message whose content and reasoning are lists of texts with those that are not empty joined.

    Readers collect lists, since each join copies what was there.
    """
    texts = ("content", "reasoning_content")
    return {k: separator.join(filter(None, value)) if k in texts else value for k, value in message.items()}


def part_text(part: Any, where: str, fields: Mapping[str, str], left_out: LeftOut | None = None) -> str:
    """Return the text of one part; `fields` and `left_out` as in `text_of`. Raises RequestError."""
    kind = part.get("type") if isinstance(part, Mapping) else part
    if left_out is not None and isinstance(part, Mapping) and isinstance(kind, str) and kind not in fields:
        return left_out.stand_in(kind)
    if not isinstance(kind, str) or kind not in fields:
        allowed = ", ".join(f"{{'type': {name!r}, {field!r}: ...}}" for name, field in fields.items())
        complaint = f"is a part of type {brief(kind)}; here this model reads only {allowed}"
        refuse(where, complaint, "unsupported_content")
    return string_in(part, fields[kind], where)


def _name(function: Any, where: str) -> str:
    """Return the name in a function object at `where`. Raises RequestError if it has none."""
    if not isinstance(function, dict) or function.get("name") is None:
        refuse(f"{where}.name", "is missing; send a string")
    name = function["name"]
    if not isinstance(name, str) or not name:
        refuse(f"{where}.name", f"is {brief(name)}, but must be a string, not empty")
    return name


def is_shallow(value: Any, levels: int) -> bool:
    """Return whether lists and objects in `value` are nested at most `levels` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (levels > 0 and all(is_shallow(one, levels - 1) for one in inner))


def parameter_types(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the JSON types of each property of an object; [] where a property's schema names no type."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema.get("$ref"), str):
            break
        target = _referred(schema["$ref"], schema)
        schema = {**(target or {}), **{key: schema[key] for key in schema if key != "$ref"}}
    properties = schema.get("properties")
    return {name: types_of(one, schema) for name, one in properties.items()} if isinstance(properties, dict) else {}


def types_of(schema: Any, root: Mapping[str, Any], known: set[str] | None = None) -> list[str]:
    """Return the JSON types that a schema names, or [].

    References are looked up in `root`; references in `known` were followed already and are skipped.
    """
    known = set() if known is None else known
    if not isinstance(schema, Mapping):
        return []
    found = _listed(schema.get("type"), str)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in known:
        known.add(reference)
        found += types_of(_referred(reference, root), root, known)
    for key in ("anyOf", "oneOf", "allOf"):
        found += [kind for one in _listed(schema.get(key), Mapping) for kind in types_of(one, root, known)]
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found = [_TYPE_OF[type(value)] for value in _listed(values, object) if type(value) in _TYPE_OF]
    return list(dict.fromkeys(found))


def _referred(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema in `root` that `reference` points to, or None."""
    found: Any = root
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _listed(value: Any, kind: type) -> list[Any]:
    """Return the values of type `kind` in a list; a single value counts as a list of one."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, kind)]


_TYPE_OF: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def check_effort(effort: Any, field: str) -> None:
    """Raise RequestError about `field` unless `effort` is None or one of EFFORTS."""
    if effort is not None and effort not in EFFORTS:
        refuse(field, f"is {brief(effort)}, but must be one of {', '.join(EFFORTS)}")
