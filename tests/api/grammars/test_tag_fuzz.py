"""Whatever a client sends as a structural tag is taken, or refused; what a taken one allows is valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tag_format import lark_of
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.guidance import GrammarError, checked
from tests.api.generation.following import COMPILER
from tests.api.grammars.odd_schemas import odd_value
from tests.api.random_tools import random_tool, read
from tests.api.walking import walk

FIELDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "max_whitespace_cnt"),
    "qwen_xml_parameter": ("json_schema",),
    "grammar": ("grammar",),
    "regex": ("pattern",),
    "any_text": ("excludes",),
    "token": ("token",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
}
TEXTS = ("", "a", "<f", "<f=x>", "</f>", "<|im_start|>", '"\\', "\n", "é", "\ud800", "/", "//")
JUNK: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**9, "x", "qwen_xml", [], {}, [None], {"a": 1})
GRAMMARS = ('root ::= "a"', 'root ::= [^/] r\nr ::= "x"*', "root ::= [", "root ::=", "start: A")
PATTERNS = ("a/b", "[0-9]+", "", "\\", "(", "a\nb", "\\/")


def junk_format(rng: random.Random, depth: int) -> Any:
    """A format with odd values in its fields here and there."""
    if rng.random() < 0.04:
        return rng.choice(JUNK)
    plain = ("const_string", "json_schema", "qwen_xml_parameter", "grammar", "regex", "any_text", "token")
    kind = rng.choice(plain if depth == 0 else list(FIELDS))
    return {"type": kind, **{name: field(rng, name, depth - 1) for name in FIELDS[kind] if rng.random() < 0.93}}


def field(rng: random.Random, name: str, depth: int) -> Any:
    if rng.random() < 0.04:
        return rng.choice(JUNK)
    match name:
        case "content":
            return junk_format(rng, depth)
        case "elements":
            return [junk_format(rng, depth) for _ in range(rng.randrange(1, 4))]
        case "tags":
            return [
                {name: field(rng, name, depth) for name in FIELDS["tag"]} | {"begin": "<f=x>"}
                for _ in range(rng.randrange(1, 3))
            ]
        case "rules":
            return [[rng.choice(TEXTS), junk_format(rng, depth)] for _ in range(rng.randrange(1, 3))]
        case "json_schema":
            return {
                "type": "object",
                "properties": {text: odd_value(rng, 2) for text in rng.sample(TEXTS, 2)},
                "required": rng.sample(TEXTS, rng.randrange(2)),
            }
        case "triggers":
            return ["<f", rng.choice(TEXTS)]
        case "end":
            return rng.choice([rng.choice(TEXTS), rng.sample(TEXTS, 3), {"type": "token", "token": 1}])
        case "token":
            return rng.choice([1, 10**9, "<|im_start|>", "nope"])
        case "grammar":
            return rng.choice(GRAMMARS)
        case "pattern":
            return rng.choice(PATTERNS)
        case "min" | "max":
            return rng.choice([-1, 0, 1, 2])
        case "excludes":
            return rng.sample(TEXTS, rng.randrange(2))
        case "style":
            return rng.choice(["json", "qwen_xml"])
        case "max_whitespace_cnt" | "at_least_one" | "stop_after_first" | "loop":
            return rng.choice([None, 0, 1, True])
        case _:
            return rng.choice(TEXTS)


def sweep(seeds: range, tokenizer: Tokenizer) -> tuple[int, int]:
    """How many tags were taken, and how many of those compile."""
    num_taken = num_compiled = 0
    for seed in seeds:
        rng = random.Random(seed)
        try:
            grammar = lark_of({"format": junk_format(rng, rng.randrange(4))}, json_options(), tokenizer)
        except (ValueError, SchemaError) as error:
            assert str(error)
            continue
        num_taken += 1
        try:
            checked(grammar)
            num_compiled += 1
        except GrammarError as error:
            assert str(error)
    return num_taken, num_compiled


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.soak)])
def test_whatever_stands_in_a_tag_is_taken_or_refused(tokenizer: Tokenizer, count: int) -> None:
    num_taken, num_compiled = sweep(range(count), tokenizer)
    assert num_taken > count / 10 and num_compiled > count / 20, (num_taken, num_compiled)


def test_parameters_in_tags_are_read_back(tokenizer: Tokenizer) -> None:
    """Those of random schemas, by the parser of Qwen3-Coder."""
    num_read = 0
    for seed in range(60):
        rng = random.Random(seed)
        tool = random_tool(rng, 0)
        tool["parameters"].setdefault("additionalProperties", False)
        content = {"type": "json_schema", "style": "qwen_xml", "json_schema": tool["parameters"]}
        tag = {
            "type": "tag",
            "begin": f"<tool_call><function={tool['name']}>",
            "content": content,
            "end": "</function>",
        }
        try:
            text = walk(COMPILER, checked(lark_of({"format": tag}, json_options(), tokenizer)), rng)
        except (SchemaError, GrammarError):
            continue
        if text is not None:
            (call,) = read("qwen3_coder", [tool], text).tool_calls
            jsonschema.Draft202012Validator(tool["parameters"]).validate(json.loads(call.arguments))
            num_read += 1
    assert num_read > 15, num_read
