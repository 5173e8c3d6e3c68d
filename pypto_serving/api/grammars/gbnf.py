"""Read GBNF, the grammars of llama.cpp, whose rules have `::=`."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection

from pypto_serving.api.grammars.grammar_text import regex
from pypto_serving.util import brief

RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.M)
"""The beginning of a rule. A grammar that has one is GBNF, not Lark."""
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"'  # text
    r"|\[(?:\\.|[^\]\\\n])*\]"  # class of characters
    r"|#[^\n]*"  # comment
    r"|[A-Za-z][\w-]*"  # name of a rule
    r"|\n|.",
)


def lark_rules(grammar: str, prefix: str) -> str:
    """Return the rules as Lark, with `prefix` before their names. Raises ValueError."""
    grammar = with_characters(grammar)
    starts = list(RULE.finditer(grammar))
    names = {start[1] for start in starts}
    if "root" not in names:
        raise ValueError("a grammar must be GBNF with a rule root, as in: root ::= ...")
    ends = [start.start() for start in starts[1:]] + [len(grammar)]
    return "\n".join(
        f"{prefix}{start[1]}: {_body(grammar[start.end() : end], prefix, names)}"
        for start, end in zip(starts, ends, strict=True)
    )


def with_characters(grammar: str) -> str:
    r"""Return a grammar with characters in place of escapes like \U0001F600. Raises ValueError."""
    return re.sub(r"\\U([0-9A-Fa-f]{8})|\\.", _character, grammar, flags=re.S)


def _character(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    code = int(found[1], 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise ValueError(f"a grammar has {found[0]}, which is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _body(text: str, prefix: str, names: Collection[str]) -> str:
    return "".join(_written(found[0], prefix, names) for found in _TOKEN.finditer(text)).strip()


def _written(token: str, prefix: str, names: Collection[str]) -> str:
    if token in ('"', "["):
        raise ValueError(f"a grammar has a {token} that nothing closes")
    if token[0] == "[":
        return regex(_class(token))
    if token[0] in "#\n":
        return " "
    if token == ".":
        return r"/(.|\n)/"
    if not (token[0].isalpha() and token.isascii()):
        return token
    if token not in names:
        raise ValueError(f"a grammar refers to a rule {brief(token)}, which it does not have")
    return prefix + token


def _class(token: str) -> str:
    """Write a class of characters for Rust, where more characters must be escaped."""
    inside = token[1:-1]
    negated = inside.startswith("^")
    escaped = re.sub(r"\\.|[\[&~]", lambda found: found[0] if len(found[0]) > 1 else "\\" + found[0], inside[negated:])
    return f"[{'^' * negated}{escaped}]"
