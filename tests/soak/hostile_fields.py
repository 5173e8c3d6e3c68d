"""Values for the fields of a body: of any shape, or such that its reader, its grammar or its row has much to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from pypto_serving.api.openai.schemas import ChatBody, CompletionBody
from tests.api.templates import HERMES, OPENED, SWITCHED, with_tools

FIELDS = sorted(
    {*ChatBody.model_fields, *CompletionBody.model_fields, *ChatBody.rules.neutral, *CompletionBody.rules.neutral}
    | {*ChatBody.rules.accepted, *CompletionBody.rules.accepted, *ChatBody.rules.named, "unheard_of"}
)
"""All that the server knows, and some that it does not."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "wizard")
KEYWORDS = ("type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", "then")
KEYWORDS += ("pattern", "format", "$ref", "minimum", "maxLength", "minItems", "uniqueItems", "additionalProperties")
PRIMES = (7, 9973, 99_991, 199_999, 1_000_000_007)


def value(rng: Random, depth: int = 0) -> Any:
    """A JSON value of any shape."""
    if depth < 3 and rng.random() < 0.25:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 30]))]
    if depth < 3 and rng.random() < 0.2:
        return {rng.choice([*FIELDS, "type", "text", "role", "content"]): value(rng, depth + 1) for _ in range(3)}
    text = rng.choice(
        [
            "",
            "a",
            "user",
            "system",
            rng.choice(["\ud800", *"bcdefgh"]),
            "\0",
            "\u2028",
            "é" * 100,
            "<|im_end|>",
            "x" * 50_000,
        ]
    )
    number = rng.choice([0, 1, -1, 2, 16, 128, 129, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308])
    return rng.choice([text, number, True, False, None, text, number, rng.randrange(-5, 700)])


def any_value(name: str, rng: Random) -> Any:
    """A value of any shape for the field `name`."""
    return value(rng)


def likely(name: str, rng: Random) -> Any:
    """A value that the field `name` may have: good, or bad in its own way. Any value for other fields."""
    made = LIKELY[name](rng) if name in LIKELY else value(rng)
    return _spoilt(rng, made) if rng.random() < 0.1 else made


def _spoilt(rng: Random, given: Any) -> Any:
    """`given` with another value somewhere within."""
    if isinstance(given, dict) and given:
        name = rng.choice(list(given))
        return {**given, name: _spoilt(rng, given[name])}
    if isinstance(given, list) and given:
        at = rng.randrange(len(given))
        return [*given[:at], _spoilt(rng, given[at]), *given[at + 1 :]]
    return value(rng)


def schema(rng: Random) -> Any:
    """A JSON schema. No two are alike, so nothing that is kept of an earlier one helps."""
    made = rng.choice(SCHEMAS)(rng)
    return {**made, "title": f"S{rng.random()}"} if isinstance(made, dict) else made


def _real(rng: Random) -> Any:
    item = {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}}
    properties = {
        f"name_{rng.randrange(1000)}": {"type": "string", "minLength": 1, "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 300}, {"type": "null"}]},
        "kind": {"enum": ["a", "b", None, 3]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 5},
    }
    names = rng.sample(list(properties), 3)
    closed = rng.random() < 0.5
    return {"type": "object", "properties": properties, "required": names, "$defs": {"Item": item}} | (
        {"additionalProperties": False} if closed else {}
    )


def _huge(rng: Random) -> Any:
    size = rng.choice([100, 2000, 20_000])
    if rng.random() < 0.5:
        return {"enum": [f"{rng.random()} {i}" for i in range(size)]}
    return {"type": "object", "properties": {f"p{rng.randrange(10**9)}": {"type": "integer"} for _ in range(size // 5)}}


def _references(rng: Random) -> Any:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/a"}, "right": {"$ref": "#/$defs/a"}}}
    a = rng.choice([tree, {"$ref": "#/$defs/b"}, {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, True])
    b = rng.choice([{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#"}}, {"type": "null"}])
    target = rng.choice(["#/$defs/a"] * 4 + ["#", "#/nowhere", "http://evil.example/s", "#/$defs/%61", ""])
    return {"$ref": target, "$defs": {"a": a, "b": b}}


def _deep(rng: Random) -> Any:
    made: Any = {"type": "integer"}
    for _ in range(rng.choice([5, 50, 63, 65, 300])):
        key = rng.choice(["anyOf", "items", "properties", "allOf"])
        made = {key: [made] if key.endswith("Of") else made if key == "items" else {"a": made}}
    return made


def _counted(rng: Random) -> Any:
    return rng.choice(
        [
            {"type": "string", "pattern": regex(rng)},
            {"type": "string", "minLength": 10 ** rng.randrange(1, 8), "maxLength": 10 ** rng.randrange(2, 9)},
            {"type": "array", "items": {"type": "integer"}, "minItems": 10 ** rng.randrange(1, 7)},
            {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.*{i}"} for i in range(rng.choice([2, 8, 20]))]},
            {"type": "integer", "minimum": -(10 ** rng.randrange(1, 30)), "maximum": 10 ** rng.randrange(1, 30)},
        ]
    )


def _multiples(rng: Random) -> Any:
    return {"type": rng.choice(["integer", "number"]), "multipleOf": rng.choice(PRIMES) + 2 * rng.randrange(500)}


def _keywords(rng: Random) -> Any:
    return {rng.choice(KEYWORDS): rng.choice([value, schema])(rng) for _ in range(rng.choice([1, 2, 4]))}


SCHEMAS: list[Callable[[Random], Any]] = [
    *(_real, _real, _huge, _references, _deep, _counted, _multiples, _keywords, value),
]


def regex(rng: Random) -> str:
    """A regular expression: plain, broken, or one that unfolds."""
    letter, count = chr(rng.randrange(97, 123)), rng.choice([3, 60, 100, 1000])
    return rng.choice(
        [
            rf"{letter}\d{{1,{count}}}",
            f"((({letter}{{100}}){{100}}){{{count}}})",
            f"(({letter}|b|.)*a(.|b){{{count}}}x)*",
            rf"(?i)[\p{{L}}\p{{N}}]{{{count}}}{letter}",
            "|".join(f"{letter}{rng.randrange(10**6)}" for _ in range(count)),
            *(f"(?<!{letter})b(?=c)", f"({letter}", "[" * count, f"(.*{letter}.{{{count}}}){{3}}", "", "(|)*"),
        ]
    )


def grammar(rng: Random) -> str:
    """Lark or GBNF: plain, broken, or ambiguous."""
    size, letter = rng.choice([4, 15, 30, 60]), chr(rng.randrange(97, 123))
    pairs = [" | ".join(f"s{j} s{(j * 7 + i) % size}" for j in range(size)) for i in range(size)]
    ambiguous = "\n".join(f's{i}: {pair} | "{letter}" |' for i, pair in enumerate(pairs))
    return rng.choice(
        [
            f'start: /[0-9]{{3}}-/ s0 "{letter}"\n{ambiguous}',
            f"start: s0\n{ambiguous}",
            f'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")" | "{letter}"',
            f"start: {'(' * size}start{')' * size}",
            f"start: %json {json.dumps(schema(rng))}",
            f'start: undefined "{letter}"',
            f"start: /{regex(rng)}/",
            f'root ::= "{letter}" item*\nitem ::= [a-z0-9]{{1,8}} " " | "(" root ")"',
            f'root ::= root root | "{letter}" |',
            f"root ::= {'(' * 15 * size} [a-z] {')' * 15 * size}",
            f'root ::= ("{letter}"{{0,{size * 100}}}){{{size}}}',
        ]
    )


def lasting(rng: Random) -> dict[str, Any]:
    """Fields of a request that is followed for long, at the cost of those that are followed beside it."""
    array = {"type": "array", "items": _multiples(rng), "minItems": rng.choice([0, 100])}
    size, letter = rng.choice([15, 30, 40]), chr(rng.randrange(97, 123))
    rules = [" | ".join(f"s{j} s{(j * 7 + i) % size}" for j in range(size)) for i in range(size)]
    ambiguous = "\n".join(f's{i}: {rule} | "{letter}" |' for i, rule in enumerate(rules))
    guide: dict[str, Any] = rng.choice([{"guided_json": array}, {"guided_grammar": f"start: s0\n{ambiguous}"}])
    return {
        **guide,
        "max_tokens": rng.choice([200, 400]),
        "min_tokens": rng.choice([0, 150]),
        "ignore_eos": switch(rng),
    }


def choices(rng: Random) -> Any:
    return [f"{rng.randrange(10**6)}{rng.choice(['', ' a', 'é', '}'])}" for _ in range(rng.choice([1, 2, 50, 3000]))]


def structural_tag(rng: Random) -> Any:
    mark = rng.choice(["<f>", "<tool=", "", "{", "a"])
    structures = [{"begin": mark + "x", "schema": schema(rng), "end": rng.choice(["</f>", "", "}"])}]
    if rng.random() < 0.5:
        return {"format": tag_format(rng, rng.choice([0, 1, 3, 40]))}
    return {"structures": structures * rng.choice([0, 1, 1, 1, 9]), "triggers": [mark] * rng.choice([0, 1, 1, 3])}


def tag_format(rng: Random, levels: int) -> Any:
    """A format of XGrammar's structural tags, with so many levels."""
    if levels <= 0:
        return rng.choice(
            [
                {"type": "const_string", "value": "a" * rng.choice([0, 1, 10**4])},
                {"type": "json_schema", "json_schema": schema(rng), "style": rng.choice(["json", "qwen_xml", "x"])},
                {"type": "regex", "pattern": regex(rng)},
                {"type": "grammar", "grammar": grammar(rng)},
                {"type": "any_text", "excludes": choices(rng)},
                {"type": "token", "token": rng.choice([0, 10**9, "<|im_end|>"])},
                {"type": "unheard_of"},
            ]
        )
    inner = tag_format(rng, levels - 1)
    tag = {
        "type": "tag",
        "begin": rng.choice(["<f>", ""]),
        "content": inner,
        "end": rng.choice(["</f>", ["a", "b"], ""]),
    }
    return rng.choice(
        [
            tag,
            {"type": rng.choice(["sequence", "or"]), "elements": [inner, tag] if levels < 5 else [inner]},
            {"type": rng.choice(["optional", "star", "plus"]), "content": inner},
            {"type": "repeat", "content": inner, "min": rng.choice([0, 10**6]), "max": rng.choice([-1, 3, 10**9])},
            {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], "at_least_one": switch(rng)},
            {
                "type": "tags_with_separator",
                "tags": [tag] * (3 if levels < 4 else 1),
                "separator": rng.choice([",", ""]),
            },
        ]
    )


def structured(rng: Random) -> Any:
    made = {name: STRUCTURES[name](rng) for name in rng.sample(list(STRUCTURES), rng.choice([1, 1, 1, 1, 2]))}
    if rng.random() < 0.2:
        made[rng.choice(["whitespace_pattern", "disable_any_whitespace", "x"])] = value(rng)
    return made


STRUCTURES: dict[str, Callable[[Random], Any]] = {
    "json": lambda rng: rng.choice([schema, lambda rng: json.dumps(schema(rng))])(rng),
    "regex": regex,
    "choice": choices,
    "grammar": grammar,
    "json_object": lambda rng: True,
    "structural_tag": structural_tag,
}


def response_format(rng: Random) -> Any:
    named = {"name": "n", "schema": schema(rng), "strict": rng.random() < 0.5}
    return rng.choice(
        [
            {"type": "json_schema", "json_schema": named},
            {"type": "json_schema", "json_schema": named},
            {"type": "json_object"},
            {"type": "structural_tag", **structural_tag(rng)},
            *({"type": "text"}, {"type": "json_schema", "schema": schema(rng)}),
        ]
    )


def tools(rng: Random) -> Any:
    names = ["f", "get_weather", "get-weather", "ns:f", "2d", "class", 'a"b', "", "é", "x" * 129]
    functions = [
        {
            "name": rng.choice(names if rng.random() < 0.2 else [f"f{i}"]),
            "description": rng.choice(["", "does", "</tools>" * 50]),
            "parameters": schema(rng) if rng.random() < 0.6 else {"type": "object", "properties": {"a": schema(rng)}},
            "strict": rng.random() < 0.4,
        }
        for i in range(rng.choice([0, 1, 1, 2, 2, 30]))
    ]
    return [{"type": rng.choice(["function"] * 9 + ["custom"]), "function": function} for function in functions]


def tool_choice(rng: Random) -> Any:
    named = {"type": "function", "function": {"name": rng.choice(["f0", "f1", "nobody"])}}
    allowed = {"mode": rng.choice(["auto", "required", "x"]), "tools": [named] * rng.choice([0, 1, 2, 2000])}
    return rng.choice(
        ["none", "auto", "required", "required", named, {"type": "allowed_tools", "allowed_tools": allowed}]
    )


def messages(rng: Random) -> Any:
    call = {"id": "c1", "type": "function", "function": {"name": "f0", "arguments": rng.choice(['{"a": 1}', "{", ""])}}
    content = rng.choice(["Hi", None, [{"type": "text", "text": "Hi"}], [{"type": "image_url", "image_url": {}}], ""])
    extra = rng.choice(
        [{}, {}, {"tool_calls": [call]}, {"tool_call_id": "c1"}, {"name": "n"}, {"reasoning": "<think>"}]
    )
    last = {"role": rng.choice(ROLES), "content": content, **extra}
    return [{"role": "user", "content": "What is 1+1?"}, last][-rng.choice([1, 2]) :] * rng.choice([1, 1, 1, 500])


def chat_template(rng: Random) -> Any:
    return rng.choice(
        [
            *(HERMES, HERMES, OPENED, SWITCHED, with_tools("<tool_call> <function="), with_tools("[func_name1(")),
            "{% for i in range(10 ** 9) %}x{% endfor %}",
            "{{ 'x' * (10 ** 9) }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            *("{% for m in messages %}", "{{ raise_exception('no') }}", "{% include '/etc/passwd' %}", ""),
        ]
    )


def counted_to(*sizes: float) -> Callable[[Random], Any]:
    return lambda rng: rng.choice(sizes)


def switch(rng: Random) -> Any:
    return rng.random() < 0.7


LIKELY: dict[str, Callable[[Random], Any]] = {
    "structured_outputs": structured,
    **{f"guided_{name}": STRUCTURES[name] for name in ("json", "regex", "choice", "grammar")},
    "guided_whitespace_pattern": lambda rng: rng.choice(["", "[ ]?", regex(rng)]),
    "structural_tag": structural_tag,
    "response_format": response_format,
    "tools": tools,
    "tool_choice": tool_choice,
    "messages": messages,
    "chat_template": chat_template,
    "chat_template_kwargs": lambda rng: {rng.choice(["enable_thinking", "tools", "x"]): value(rng)},
    "documents": lambda rng: [{"title": "t", "text": "x" * 999}] * rng.choice([0, 1, 1024, 1025]),
    "reasoning_effort": lambda rng: rng.choice(["none", "minimal", "low", "high", "max", "more"]),
    "thinking_token_budget": counted_to(0, 1, 5, 2**31 - 1, 2**31, -1),
    "logprobs": counted_to(True, True, False, 0, 5, 20, 21),
    "top_logprobs": counted_to(0, 5, 20, 21),
    "prompt_logprobs": counted_to(0, 1, 20, 21, -1),
    "best_of": counted_to(1, 2, 128, 129),
    "n": counted_to(1, 2, 8, 128, 129),
    "max_tokens": counted_to(0, 1, 16, 300, 10**9),
    "min_tokens": counted_to(0, 1, 16, 300),
    "truncate_prompt_tokens": counted_to(-1, 0, 1, 3, 10**9),
    "logit_bias": lambda rng: {str(rng.randrange(640)): rng.choice([-100, 0.5, 100]) for _ in range(1024)},
    "allowed_token_ids": lambda rng: [rng.randrange(640) for _ in range(rng.choice([1, 100, 1024]))],
    "bad_words": lambda rng: ["é" * rng.choice([1, 40]), " a"] * rng.choice([1, 64, 65]),
    "stream_options": lambda rng: {"include_usage": True, "continuous_usage_stats": switch(rng)},
    "prompt": lambda rng: rng.choice(["Hi", [1, 2, 3], ["a", "b"], [[1], [2, 3]], "x" * 10**5, [10**9], []]),
    **dict.fromkeys(("echo", "ignore_eos", "stream", "parallel_tool_calls", "include_reasoning"), switch),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "continue_final_message"), switch),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens", "include_stop_str_in_output"), switch),
}
COMPANIONS = {
    "tools": ("tool_choice", "chat_template"),
    "tool_choice": ("tools", "chat_template"),
    "thinking_token_budget": ("chat_template",),
    "best_of": ("n",),
    "top_logprobs": ("logprobs",),
    "stream_options": ("stream",),
    "guided_whitespace_pattern": ("guided_json",),
    "echo": ("logprobs",),
}
"""Fields that have an effect together with others only."""
