"""Strict functions in free text: whatever the grammar allows, the parser reads no other calls of theirs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import jsonschema
import pytest

from pypto_serving.api.chat.parsers.families import FAMILIES, CallForm
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tool_grammar import strict_calls
from pypto_serving.guidance import Compiler
from pypto_serving.types.guide import Grammar
from tests.api.random_tools import FIND, LOOSE, read
from tests.api.walking import TEMPTING, after, walk

FUNCTIONS = [FIND, LOOSE]
BEGINNINGS = (
    *('{"name"', '{"name": "find", "', '{ "parameters": {', '{"n\\u0061me": "find"', '{"id": "3", "name": "look", '),
    *('[{"name": "find', "```json\n{", "[find(", '[look(z="x")', "[1, 2", '{"x": 1}', "\x1c", "[x\u00b2(), "),
    *TEMPTING,
)
"""How calls begin in some form, and what looks like it."""
ARGUMENTS = {
    "json": '{"a": %s}',
    "python": "a=%s",
    "xml": "<parameter=a>\n%s\n</parameter>\n",
    "dsml": '<｜DSML｜parameter name="a" string="false">%s</｜DSML｜parameter>\n',
}


def call(form: CallForm, value: str) -> str:
    return f"{form.head}find{form.middle}{ARGUMENTS[form.arguments] % value}{form.tail}"


def wrong_texts(form: CallForm) -> list[str]:
    """Calls with a wrong argument: with all that is around them or its last parts, and as those that follow others."""
    wrong = call(form, "7")
    block = f"{form.begin}{wrong}{form.between}{wrong}{form.end}"
    ends = [block[at:] for at, char in enumerate(block) if char in "<[{"]
    marked = [start + block for start in form.starts if start not in block]
    fenced = [a + wrong + b for a, b in form.fences]
    gaps = ["", "\n", "; ", ";", ", ", form.between]
    return [block, *ends, *marked, *fenced, *(gap + wrong for gap in gaps)]


def has_wrong_call(family: str, text: str, one: bool) -> bool:
    return any(
        found.name == "find" and not jsonschema.Draft202012Validator(FIND["parameters"]).is_valid(given)
        for found in read(family, FUNCTIONS, text, one).tool_calls
        for given in [json.loads(found.arguments)]
    )


def grammars(family: str, one: bool) -> Iterator[Grammar]:
    """With marks as text, and with marks that are special tokens, which the texts here spell."""
    form = FAMILIES[family]
    ids = {mark: i for i, mark in enumerate(form.marks, 1)}
    for special in {}.get, ids.get:
        yield strict_calls(form, FUNCTIONS, one, special, json_options())


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler.of_bytes()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("one", [False, True])
def test_random_texts_have_no_wrong_call(compiler: Compiler, family: str, one: bool) -> None:
    """Texts full of calls with wrong arguments, and beginnings of calls."""
    form, num_calls = FAMILIES[family], 0
    right = call(form, "1")
    words = (*BEGINNINGS, *form.starts, right, f"{form.begin}{right}{form.end}", *wrong_texts(form))
    for grammar in grammars(family, one):
        for seed in range(400):
            text = walk(compiler, grammar, random.Random(seed), words, 500)
            if text is not None:
                assert not has_wrong_call(family, text, one), text
                num_calls += len(read(family, FUNCTIONS, text, one).tool_calls)
            if seed > 12 and num_calls:
                break
    assert num_calls > 0


@pytest.mark.thinned(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("one", [False, True])
def test_no_wrong_call_follows_what_may_stand_before_it(compiler: Compiler, family: str, one: bool) -> None:
    form, num_wrong = FAMILIES[family], 0
    right = call(form, "1")
    before = ("", "x", "\n", "\x1c", "x <", right, form.begin + right + form.end)
    matchers = [compiler.compile(grammar) for grammar in grammars(family, one)]
    for first, wrong in itertools.product(before, wrong_texts(form)):
        if has_wrong_call(family, first + wrong, one):
            num_wrong += 1
            assert all(after(matcher, first + wrong) is None for matcher in matchers), first + wrong
    assert num_wrong > 0


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", "Well. <function=find>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> Done."),
        ("deepseek_v31", '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("llama3_json", '{"name": "find", "parameters": {"a": 1}}; {"name": "find", "parameters": {"a": 2}} Done; {'),
    ],
)
def test_right_calls_without_the_first_mark(compiler: Compiler, family: str, text: str) -> None:
    grammar, _ = grammars(family, False)
    assert after(compiler.compile(grammar), text) is not None
    assert read(family, FUNCTIONS, text).tool_calls
