"""Guides: what the tokens of an output must match. Made in the API process, followed by a row of the worker."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_GRAMMAR_CHARS = 1 << 18
"""Characters of a grammar, which travels with each row that follows it."""

GrammarSyntax = Literal["json_schema", "regex", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A language. The text of an output matches all of it, or a beginning of it if the output ends for another reason.

    - `json_schema`: JSON that is valid under the schema `text`; `{"type": "object"}` is any object.
    - `regex`: text that the whole regular expression matches, in the syntax of Rust's regex, without anchors.
    - `lark`: a context-free grammar in llguidance's dialect of Lark; `start` is its first rule. `%json {...}` in a rule
      stands for JSON of a schema, `<[5]>` for the token of this id.
    - `gbnf`: a context-free grammar whose rules have `::=`, as in llama.cpp.
    """

    syntax: GrammarSyntax
    text: str


class Reasoning(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an output begins with reasoning. Its end is found in the text, however the tokens cut it.

    - `begin`: "" if the prompt opened it, so every output begins with reasoning. Otherwise an output has reasoning only
      if it begins with this text, maybe after white space.
    - `end`: ends it; what follows is content. Never empty.
    - `calls`: texts that end it too, but belong to the content.
    - `begin_ids`, `end_ids`: the tokens that `begin` and `end` are written with where a guide writes them.
    """

    begin: str
    end: str
    calls: tuple[str, ...]
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


class Guide(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an output must match, token by token.

    - `grammar`: of the content, which is what follows the reasoning; None allows anything.
    - `reasoning`: None if the output has none. No grammar holds there, and no end-of-sequence token ends it before
      a grammar began.
    - `max_reasoning_tokens`: after this many tokens of reasoning, its beginning not counted, the next tokens are the
      rest of `end_ids`; None for no limit.
    - `field`: the request field that the grammar comes from, for messages.
    - `client`: whose grammar it is. Changes whose turn it is, and no output.
    """

    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    max_reasoning_tokens: int | None = None
    field: str = "structured_outputs"
    client: str = ""
