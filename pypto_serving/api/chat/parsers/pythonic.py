"""Read calls written as a Python list: `[f(a=1), g(b="x")]` at the beginning, as of Llama 3.2, Llama 4 and OLMo."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from typing import Any

from pypto_serving.api.chat.parsers.json_calls import SPACE, BracketScanner, refuse_constant
from pypto_serving.api.chat.parsers.scanner import (
    OutputScanner,
    Steps,
    Tools,
    end_calls,
    past_space,
    read_marked,
    to_json,
)

START, END = "<|python_start|>", "<|python_end|>"
_BEGUN = rf"""\[{SPACE}[^\s\x1c-\x1f()\[\]{{}}"',:;=]*"""
OPENS = rf"{SPACE}{_BEGUN}\("
_OPENING = re.compile(rf"{_BEGUN}\(")
_BEGINNING = re.compile(_BEGUN)
_MAX_NAME = 256
_CALL = re.compile(r"\s*([^\W\d][\w.]*)\(\s*")
_KEY = re.compile(r"((?!\d)(?:\w|[^\x00-\x7F\s])+)\s*=\s*")
_WRITTEN = re.compile(rb"[^\s=(\\]+")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_NEXT = {end: re.compile(rf"\s*(?:,\s*|(?={re.escape(end)}))") for end in ")]"}
_DECODER = json.JSONDecoder(parse_int=lambda digits: 0, parse_constant=refuse_constant)
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls; a list without marks counts only where the output begins with it."""
    if (yield from _read_list(scanner, 0)):
        yield from end_calls(scanner, START)
    yield from read_marked(scanner, (START,), _read_list, ends=(END,))


def _read_list(scanner: OutputScanner, at: int) -> Steps[bool]:
    """Read the list at `at`, and give out its calls once it is complete; consume nothing if it is none."""
    at = yield from past_space(scanner, at)
    while not _OPENING.match(scanner.text, at, at + _MAX_NAME):
        begun = _BEGINNING.match(scanner.text, at, at + _MAX_NAME)
        if begun is None or begun.end() < len(scanner.text) or scanner.ended:
            return False
        yield
    brackets = BracketScanner(at, python=True)
    while not brackets.advance(scanner.text):
        if scanner.ended:
            return False
        yield
    text = scanner.text[at : brackets.at]
    calls = _parse_json(text) or _parse_python(text)
    for name, arguments in calls:
        scanner.call(name)
        scanner.arguments(arguments)
    if calls:
        scanner.drop(brackets.at)
    return bool(calls)


def _parse_json(text: str) -> list[tuple[str, str]]:
    """Return like `_parse_python` the calls of a text whose values are all JSON, which stay as they are."""
    calls, at = [], 1
    while not text.startswith("]", at):
        call = _CALL.match(text, at)
        if call is None:
            return []
        at, values = call.end(), {}
        while not text.startswith(")", at):
            key = _KEY.match(text, at)
            if key is None:
                return []
            try:
                end = _DECODER.raw_decode(text, key.end())[1]
            except (ValueError, RecursionError):
                return []
            values[key[1]] = text[key.end() : end]
            if (after := _NEXT[")"].match(text, end)) is None:
                return []
            at = after.end()
        calls.append((call[1], "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in values.items()) + "}"))
        if (after := _NEXT["]"].match(text, at + 1)) is None:
            return []
        at = after.end()
    return calls


def _parse_python(text: str) -> list[tuple[str, str]]:
    """Return the name and the JSON arguments of each call; [] if the text is no list of calls with literal values."""
    try:
        listed = ast.parse(text, mode="eval").body
        lines = _LINE_END.split(text.encode())
        return [_call(entry, lines) for entry in listed.elts] if isinstance(listed, ast.List) else []
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _call(entry: ast.expr, lines: list[bytes]) -> tuple[str, str]:
    if not isinstance(entry, ast.Call) or not isinstance(entry.func, ast.Name | ast.Attribute) or entry.args:
        raise ValueError
    arguments: dict[str, Any] = {}
    for keyword in entry.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[_as_written(keyword.arg, keyword, lines)] = _value(keyword.value)
    return _as_written(ast.unparse(entry.func), entry.func, lines), to_json(arguments)


def _as_written(name: str, node: ast.keyword | ast.expr, lines: list[bytes]) -> str:
    """Return a name that Python has normalized as it stands in the text."""
    found = _WRITTEN.match(lines[node.lineno - 1], node.col_offset)
    written = name if found is None else found[0].decode()
    return written if unicodedata.normalize("NFKC", written) == name else name


def _value(node: ast.expr) -> Any:
    """Return the value of a literal; the names of JSON's constants count, too."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError
    return value


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value
