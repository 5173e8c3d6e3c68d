"""Translate the regular expressions of JSON Schema, which use ECMAScript's syntax, to Rust's."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SPACE = r"\t\n\x0B\x0C\r\x20\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_CLASSES: Mapping[str, str] = {
    r"\d": "0-9",
    r"\D": "[^0-9]",
    r"\w": "0-9A-Za-z_",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": _SPACE,
    r"\S": f"[^{_SPACE}]",
}
"""Classes of characters, written for use between brackets."""
_CONTROLS: Mapping[str, str] = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~")
_ESCAPE = (
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]{1,6}\}"
    r"|\\x[0-9a-fA-F]{2}|\\c[A-Za-z]|\\[pP]\{[\w=]+\}|\\."
)
_COUNT = r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??"
_TOKEN = re.compile(
    rf"{_ESCAPE}|\[(?:\\.|[^\]\\])*\]|\(\?(?:P?<[A-Za-z_]\w*>|:|<?[=!])?|{_COUNT}|.",
    re.S,
)
_IS_COUNT = re.compile(_COUNT)
_UNCOUNTED = re.compile(rf"{_COUNT}|\(\?.*|[(|^$]?|\\[bB]")
"""Tokens that a quantifier cannot follow."""
_IN_BRACKETS = re.compile(rf"{_ESCAPE}|.", re.S)


def to_rust(pattern: str) -> str:
    """Return a Rust expression that matches the same texts. Raises ValueError if there is none, or for bad patterns."""
    written, before = [], ""
    for found in _TOKEN.finditer(pattern):
        token = found[0]
        if _IS_COUNT.fullmatch(token) and _UNCOUNTED.fullmatch(before):
            raise ValueError(f"a regex with {token} after {before or 'nothing'}, which cannot be repeated")
        written.append(_written(token))
        before = token
    return "".join(written)


def _written(token: str) -> str:
    if token[0] == "[":
        return _brackets(token)
    if token[0] == "\\":
        if token in _CLASSES:
            return f"[{_CLASSES[token]}]"
        return token if token[1:2] in ("b", "B", "p", "P") else _literal(_char(token))
    if token[:2] == "(?":
        if token[-1] in "=!":
            raise ValueError("a regex with look-around")
        if token == "(?":
            raise ValueError("a regex with flags or a group after (?, which are not supported")
        return "(?:" if token[-1] == ">" else token
    if len(token) > 1:
        return token.removesuffix("?")  # a lazy quantifier matches the same texts
    if token == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    return token if token in "()|^$*+?" else _literal(token)


def _brackets(token: str) -> str:
    """Translate a class of characters; escape characters that are operators only in Rust."""
    if token == "[":
        raise ValueError("a regex with a bracket that does not close")
    negated = token[1] == "^"
    parts = _IN_BRACKETS.findall(token[1 + negated : -1])
    made = []
    at = 0
    while at < len(parts):
        part = parts[at]
        if _is_class(part):
            made.append(_CLASSES.get(part, part))
        elif parts[at + 1 : at + 2] == ["-"] and at + 2 < len(parts) and not _is_class(parts[at + 2]):
            made.append(f"{_literal(_char(part))}-{_literal(_char(parts[at + 2]))}")
            at += 2
        else:
            made.append(_literal(_char(part)))
        at += 1
    if not made:
        return "(?s:.)" if negated else r"[^\x00-\x{10FFFF}]"
    return f"[{'^' * negated}{''.join(made)}]"


def _is_class(part: str) -> bool:
    return part in _CLASSES or part[:2] in (r"\p", r"\P")


def _char(part: str) -> str:
    """Return the character that a literal or an escape stands for."""
    if part[0] != "\\":
        return part
    name = part[1:]
    if name in _CONTROLS:
        return _CONTROLS[name]
    if name == "b":
        return "\b"
    if len(name) == 1 and not (name.isascii() and name.isalnum()):
        return name
    if name[:1] == "c" and len(name) == 2:
        return chr(ord(name[1]) % 32)
    units = [int(digits, 16) for digits in re.findall(r"[ux]\{?([0-9a-fA-F]+)", name)]
    if not units:
        raise ValueError(f"a regex with {part}, which ECMAScript does not know")
    code = units[0] if len(units) == 1 else 0x10000 + ((units[0] - 0xD800) << 10) + (units[1] - 0xDC00)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"a regex with {part}, which is no character")
    return chr(code)


def _literal(char: str) -> str:
    if char in _SPECIAL:
        return "\\" + char
    return char if char.isprintable() else f"\\x{{{ord(char):X}}}"
