"""Read GBNF, the grammars of llama.cpp, whose rules have `::=`."""

from __future__ import annotations

import re

from pypto_serving.api.generation.grammar_text import regex

_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.M)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"'  # text
    r"|\[(?:\\.|[^\]\\\n])*\]"  # class of characters
    r"|#[^\n]*"  # comment
    r"|[A-Za-z][\w-]*"  # name of a rule
    r"|\n|.",
)


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF, and not Lark: some line begins with a rule."""
    return _RULE.search(grammar) is not None


def lark_rules(grammar: str, prefix: str) -> str:
    """Return the rules as Lark, with `prefix` before their names. Raises ValueError."""
    starts = list(_RULE.finditer(grammar))
    if not any(start[1] == "root" for start in starts):
        raise ValueError("a grammar must be GBNF with a rule root, as in: root ::= ...")
    ends = [start.start() for start in starts[1:]] + [len(grammar)]
    return "\n".join(
        f"{prefix}{start[1]}: {_body(grammar[start.end() : end], prefix)}"
        for start, end in zip(starts, ends, strict=True)
    )


def _body(text: str, prefix: str) -> str:
    return "".join(_written(found[0], prefix) for found in _TOKEN.finditer(text)).strip()


def _written(token: str, prefix: str) -> str:
    if token in ('"', "["):
        raise ValueError(f"a grammar has a {token} that nothing closes")
    if token[0] == "[":
        return regex(_class(token))
    if token[0] in "#\n":
        return " "
    if token == ".":
        return r"/(.|\n)/"
    return prefix + token if token[0].isalpha() and token.isascii() else token


def _class(token: str) -> str:
    """Write a class of characters for Rust, where more characters have a meaning."""
    inside = token[1:-1]
    negated = inside.startswith("^")
    escaped = re.sub(r"\\.|[\[&~]", lambda found: found[0] if len(found[0]) > 1 else "\\" + found[0], inside[negated:])
    return f"[{'^' * negated}{escaped}]"
