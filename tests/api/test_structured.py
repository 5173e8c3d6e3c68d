"""What requests may say of the structure of outputs: what the engine gets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from pypto_serving import SamplingParams, StructuredOutputsParams, limits
from pypto_serving.api.grammars.json_schema import ESCAPES, WHITESPACE
from pypto_serving.api.grammars.structured import literal, without_anchors
from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS, Guide
from tests.api.bad_bodies import HELLO
from tests.api.conftest import new_engine
from tests.api.running import CHAT, COMPLETIONS, RunningServer, is_served_until
from tests.schemas import UNSUPPORTED

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
RESPONSE_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
}
BOUNDED = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
GBNF = 'root ::= "a" [0-9]+'
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """A server that takes bodies as large as by default."""
    running = RunningServer(new_engine(tokenizer), load_serving_config(checkpoint))
    yield running
    running.stop()


def guide_of(server: RunningServer, path: str, **fields: Any) -> Guide | None:
    """The guide of the engine request that a body becomes."""
    body = {"messages": [HELLO]} if path == CHAT else {"prompt": "a"}
    response = server.post(path, {**body, **fields})
    assert response.status_code == 200, response.text
    params = server.engine.requests[-1].params
    assert params.structured_outputs is None
    return params.guide


FORMS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": RESPONSE_FORMAT}, "json_schema", {"x-guidance": BOUNDED, **SCHEMA}),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"x-guidance": BOUNDED, "type": "object"}),
    (
        {"response_format": {"type": "json_object", "schema": None, "json_schema": {"schema": SCHEMA}}},
        "json_schema",
        {"x-guidance": BOUNDED, **SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", {"x-guidance": BOUNDED, **SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", {"x-guidance": BOUNDED, **SCHEMA}),
    ({"guided_json": SCHEMA}, "json_schema", {"x-guidance": BOUNDED, **SCHEMA}),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"x-guidance": BOUNDED, "type": "object"}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "json_schema",
        {"x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}, **SCHEMA},
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        "json_schema",
        {"x-guidance": BOUNDED, **SCHEMA, "additionalProperties": False},
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
        "json_schema",
        {"x-guidance": {**BOUNDED, "whitespace_pattern": "[ ]?"}, **SCHEMA},
    ),
    ({"structured_outputs": {"regex": "^a+$"}}, "regex", "a+"),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["yes", "n."]}}, "regex", r"yes|n\x{2e}"),
    ({"guided_choice": ["yes"]}, "regex", "yes"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ({"guided_grammar": 'start: "::="  // a ::= b'}, "lark", 'start: "::="  // a ::= b'),
]


@pytest.mark.parametrize(("fields", "syntax", "said"), FORMS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_form_becomes_a_grammar(
    server: RunningServer, path: str, fields: dict[str, Any], syntax: str, said: Any
) -> None:
    guide = guide_of(server, path, **fields)
    assert guide is not None and guide.grammar is not None and guide.reasoning is None
    assert guide.grammar.syntax == syntax
    text = guide.grammar.text
    assert (json.loads(text) if syntax == "json_schema" else text) == said
    if syntax == "json_schema":  # the order of properties is that of the answer
        assert list(json.loads(text).get("properties", SCHEMA["properties"])) == ["b", "a"]


def test_gbnf_and_tags_reach_the_engine_as_lark(server: RunningServer) -> None:
    for fields in ({"guided_grammar": GBNF}, {"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}):
        guide = guide_of(server, CHAT, **fields)
        assert guide is not None and guide.grammar is not None and guide.grammar.syntax == "lark"
    guide = guide_of(server, CHAT, response_format={"type": "structural_tag", "format": {"type": "any_text"}})
    assert guide is not None and guide.grammar is not None and guide.grammar.text.startswith("start: TEXT")
    guide = guide_of(server, CHAT, response_format={"type": "structural_tag", **TAG})
    assert guide is not None and guide.grammar is not None and '"=a>" ' in guide.grammar.text


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_whatever_strict_says(server: RunningServer, strict: bool | None) -> None:
    wanted = {"type": "json_schema", "json_schema": {**RESPONSE_FORMAT["json_schema"], "strict": strict}}
    assert guide_of(server, CHAT, response_format=wanted) == guide_of(server, CHAT, response_format=RESPONSE_FORMAT)


def test_what_asks_for_no_structure_has_no_guide(server: RunningServer) -> None:
    neutral = {"response_format": {"type": "text"}, "structured_outputs": None, "guided_choice": [], "guided_regex": ""}
    for path in (CHAT, COMPLETIONS):
        assert guide_of(server, path, **neutral) is None
        assert guide_of(server, path, response_format=None) is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema is None"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "is 5"),
    ({"response_format": "json"}, "response_format", "'json'"),
    ({"response_format": {}}, "response_format", "type is None"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice of json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has none of json"),
    ({"structured_outputs": {}}, "structured_outputs", "has none of json"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "has none of json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "a list of texts, not empty"),
    ({"structured_outputs": {"jason": {}}}, "structured_outputs", "has 'jason'"),
    ({"structured_outputs": [1]}, "structured_outputs", "must be an object"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "regex = 5"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs", "choice = 'yes'"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "a list of texts"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "cannot be read"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be a JSON object"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs", "whitespace_pattern = 5"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json", "unclosed group"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex and guided_choice"),
    ({"response_format": RESPONSE_FORMAT, "guided_regex": "a"}, "guided_regex", "an output has one structure"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex", "whitespace_pattern, which is for JSON"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "no JSON is asked for"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
    ({"guided_grammar": "root ::= " + "(" * 2000 + '"a"' + ")" * 2000}, "guided_grammar", "nests too deeply"),
    ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json", "U+D800"),
    ({"guided_json": {"const": "a\x01"}}, "guided_json", "#/const cannot be enforced: a text with U+0001"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "nothing can match it"),
    ({"guided_json": {"type": "strin"}}, "guided_json", "#/type is 'strin', but must be"),
    ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "x-guidance"),
    ({"guided_json": {"properties": {"not": {"anyOf": [{"not": {}}]}}}}, "guided_json", "#/properties/not/anyOf/0/not"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag", "structures and triggers"),
    ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structural_tag", "format is {}, but must be"),
    ({"structural_tag": {**TAG, "triggers": ["<"] * 129}}, "structural_tag", "129 triggers, but may have 128"),
    (
        {"structural_tag": {"format": {"type": "qwen_xml_parameter", "json_schema": {"not": {}}}}},
        "structural_tag",
        "format.json_schema: #/not cannot be enforced: the keyword not",
    ),
    (
        {"structural_tag": {"format": {"type": "const_string", "value": "a" * 300_000}}},
        "structural_tag",
        "the grammar has more than 262144 characters up to here; send less",
    ),
    (
        {"guided_json": {"type": "string", "pattern": "(?i)a"}},
        "guided_json",
        "#/pattern cannot be enforced: '(?i)a' is a regex with flags",
    ),
    (
        {"structural_tag": {**TAG, "triggers": ["x"]}},
        "structural_tag",
        "begin is '<f=a>', but must begin with one of the triggers",
    ),
    ({"guided_regex": "x" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", f"may have {MAX_GRAMMAR_CHARS}"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{p}-{i}" for i, (_, p, _) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_named(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    for path, body in ((CHAT, {"messages": [HELLO]}), (COMPLETIONS, {"prompt": "a"})):
        response = server.post(path, {**body, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert words in error["message"]


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=str)
def test_keywords_that_cannot_be_enforced_are_named(server: RunningServer, schema: dict[str, Any]) -> None:
    """At any depth, and not where a property has such a name."""
    nested = {"type": "object", "properties": {"p": {"type": "array", "items": {"anyOf": [schema]}}}}
    keyword = next(name for name in schema if name not in ("type", "then"))
    for wanted in (schema, nested):
        error = server.post(CHAT, {"messages": [HELLO], "guided_json": wanted}).json()["error"]
        assert error["param"] == "guided_json"
        place = "#" if wanted is schema else "#/properties/p/items/anyOf/0"
        assert f"{place}/{keyword}" in error["message"], error
    named = {"type": "object", "properties": {keyword: {"type": "integer"}}}
    assert server.post(CHAT, {"messages": [HELLO], "guided_json": named}).status_code == 200


def test_a_model_without_a_tokenizer_says_so(tokenizer: Tokenizer) -> None:
    bare = RunningServer(new_engine(tokenizer), load_serving_config("", served_model_names=("x",)))
    error = bare.post(COMPLETIONS, {"prompt": [1], "guided_regex": "a"}).json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "unsupported_field")
    assert "no tokenizer.json" in error["message"]
    bare.stop()


def test_sampling_params_take_a_mapping_or_refuse() -> None:
    for given, words in (({"regex": "a", "json_object": True}, "exactly one"), (5, "must be an object")):
        with pytest.raises(RequestError, match=words):
            SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(regex="a")


def test_clients_parse_into_models(server: RunningServer) -> None:
    """The schemas that OpenAI's client makes of pydantic models are accepted."""

    class Step(pydantic.BaseModel):
        why: str
        result: float | None

    class Answer(pydantic.BaseModel):
        steps: list[Step]
        kind: str

    with pytest.raises(openai.LengthFinishReasonError):  # the scripted engine does not follow
        server.openai().chat.completions.parse(model="tiny0", messages=[HELLO], response_format=Answer)  # type: ignore[list-item]
    guide = server.engine.requests[-1].params.guide
    assert guide is not None and guide.grammar is not None and "$defs" in guide.grammar.text


MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(15_000)}}
PRODUCT = [{"anyOf": [{"properties": {f"a{i}{j}": {"pattern": "a{9}b*"}}} for j in range(6)]} for i in range(9)]
DOUBLING = "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(999)) + '\na999: "x"'
CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
HOSTILE: dict[str, dict[str, Any]] = {
    "properties": {"guided_json": MANY},
    "multiple": {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
    "enum": {"guided_json": {"enum": [f"value {i}" for i in range(40_000)]}},
    "4 MB": {"guided_json": {"enum": ["x" * 1000] * 4000}},
    "nested": {"guided_json": json.loads('{"items":' * 60 + "{}" + "}" * 60)},
    "very nested": {"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "product": {"guided_json": {"allOf": PRODUCT}},
    "circle": {"guided_json": CIRCLE},
    "regex": {"guided_regex": "(x+x+)+y"},
    "repeat": {"guided_regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
    "open": {"guided_regex": "(" * 200_000},
    "doubling": {"guided_grammar": DOUBLING},
    "gbnf": {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
}


GIVEN_UP = {"properties": "invalid_grammar", "multiple": "reading_timeout"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_costs_its_own_request(
    server: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken or refused, others are served meanwhile, and afterwards as well."""
    monkeypatch.setattr(limits, "CPU_S", 1.0)
    body = {"prompt": "a", "max_tokens": 1, **HOSTILE[name]}
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(server.http.post, COMPLETIONS, content=json.dumps(body))
        assert is_served_until(server, slow)
    response: httpx.Response = slow.result()
    assert response.status_code in (200, 400), response.text
    assert guide_of(server, COMPLETIONS, guided_choice=["a"]) is not None
    if name in GIVEN_UP:
        assert response.json()["error"]["code"] == GIVEN_UP[name]


@pytest.mark.parametrize(("regex", "bare"), [("^a$", "a"), ("a", "a"), (r"^a\$", r"a\$"), (r"a\\$", r"a\\"), ("$", "")])
def test_anchors_at_both_ends_change_nothing(regex: str, bare: str) -> None:
    assert without_anchors(regex) == bare


def test_literals_have_no_special_characters() -> None:
    assert literal("aZ9") == "aZ9"
    assert literal("a.*\n😀") == r"a\x{2e}\x{2a}\x{a}\x{1f600}"
