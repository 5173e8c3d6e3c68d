"""Guides: constraints on the tokens of an output. Made in the API process, followed by rows of the worker."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_GRAMMAR_CHARS = 1 << 18
"""Limit of characters of a grammar, which is sent to the worker with each row that follows it."""

GrammarSyntax = Literal["json_schema", "regex", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A formal language. An output is a text of it, or the beginning of one if the output ends early.

    - `json_schema`: JSON that is valid under the schema `text`; `{"type": "object"}` allows any object.
    - `regex`: text that the whole regular expression matches, in the syntax of Rust's regex, without anchors.
    - `lark`: a context-free grammar in llguidance's dialect of Lark; `start` is its first rule. `%json {...}` in a rule
      stands for JSON that matches a schema, `<[5]>` for the token with id 5.
    - `gbnf`: a context-free grammar whose rules have `::=`, as in llama.cpp.
    """

    syntax: GrammarSyntax
    text: str


class Reasoning(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The marks around the reasoning with which an output begins. They are found in text, not in token ids.

    - `begin`: "" if the prompt opens the reasoning, so every output begins with it. Otherwise an output has reasoning
      only if it begins with this text, perhaps after white space.
    - `end`: the text after the reasoning, before the content. Never empty.
    - `calls`: texts that also end the reasoning, but belong to the content.
    - `begin_ids`, `end_ids`: token ids of `begin` and `end` for a guide that writes these itself.
    """

    begin: str
    end: str
    calls: tuple[str, ...]
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


class Guide(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Constraints on an output, token by token.

    - `grammar`: grammar of the content, which follows the reasoning; None allows any text.
    - `reasoning`: None if the output has none. The grammar does not apply to reasoning; if there is a grammar, no
      end-of-sequence token may end the output before the content.
    - `max_reasoning_tokens`: after this many tokens of reasoning, not counting `begin`, the next tokens are the rest of
      `end_ids`; None for no limit.
    - `field`: the request field that the grammar comes from, for error messages.
    - `client`: the client whose grammar this is. Affects only the order in which grammars are served, not outputs.
    """

    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    max_reasoning_tokens: int | None = None
    field: str = "structured_outputs"
    client: str = ""
