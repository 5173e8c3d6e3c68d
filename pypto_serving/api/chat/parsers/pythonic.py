"""Read calls written as Python.

- `[f(a=1), g(b="x")]` at the beginning (Llama 3.2, Llama 4) or between marks (LFM2)
- one in each line between marks (OLMo 3)
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
import warnings
from typing import Any

from pypto_serving.api.chat.parsers.json_calls import SPACE, BracketScanner, refuse_constant
from pypto_serving.api.chat.parsers.recovery import Markup, without_slip
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, find, past_space, to_json

START, END = "<|python_start|>", "<|python_end|>"
LFM2, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LINES, LINES_END = "<function_calls>", "</function_calls>"
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
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_BETWEEN_LINES = re.compile(r"\)\s*\n(?=\s*[^\W\d][\w.]*\()")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_list(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read a list of calls, and give them out once it is complete. Its last bracket may be missing at the end."""
    at = yield from past_space(scanner)
    while not _OPENING.match(scanner.text, at, at + _MAX_NAME):
        begun = _BEGINNING.match(scanner.text, at, at + _MAX_NAME)
        if begun is None or begun.end() < len(scanner.text) or scanner.ended:
            return False
        yield
    brackets = BracketScanner(at)
    while not brackets.advance(scanner.text) and not scanner.ended:
        yield
    missing = "" if brackets.done else "]"
    return _give_calls(scanner, scanner.text[at : brackets.at] + missing, brackets.at)


def read_lines(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read calls that stand in a line each, without brackets, up to the mark after them or the end."""
    end = yield from find(scanner, LINES_END)
    end = len(scanner.text) if end < 0 else end
    text = without_slip(scanner.text[:end].rstrip(), LINES_END)
    if text.lstrip().startswith("["):
        return (yield from read_list(scanner, tools, any_name))
    return _give_calls(scanner, f"[{text}]", len(text))


def _give_calls(scanner: OutputScanner, text: str, end: int) -> bool:
    """Give out the calls of a list that ends at `end`; False if it is none. Between calls may stand line breaks."""
    text = _STRING.sub(lambda found: _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], found[0]), text)
    text = _BETWEEN_LINES.sub("),", text)
    calls = _parse_json(text) or _parse_python(text)
    for name, arguments in calls:
        scanner.call(name)
        scanner.arguments(arguments)
    scanner.drop(end)
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
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of escapes that are none
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


MARKUP = Markup(read_list, starts=(START,), ends=(END,))
MARKUP_OF_LFM2 = Markup(read_list, starts=(LFM2,), ends=(LFM2_END,))
MARKUP_OF_LINES = Markup(read_lines, starts=(LINES,), ends=(LINES_END,))
