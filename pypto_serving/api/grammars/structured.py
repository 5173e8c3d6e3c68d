"""Make the guide of a request: what its output must match."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from pypto_serving.api.grammars import schema_errors
from pypto_serving.api.grammars.gbnf import is_gbnf, with_characters
from pypto_serving.api.grammars.grammar_text import literal
from pypto_serving.api.grammars.json_schema import WHITESPACE, SchemaError, prepare
from pypto_serving.api.grammars.tag_format import FormatWriter
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS, Grammar, Guide
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.structured import StructuredOutputsParams
from pypto_serving.util import brief

ANY_OBJECT = {"type": "object"}
CHECKED = 16
"""Grammars that are known to compile."""
MAX_STRUCTURES = 128
_FIELDS = {"begin", "schema", "end"}


def with_guide(params: SamplingParams, prompter: Prompter) -> SamplingParams:
    """Return parameters whose `structured_outputs` became the grammar of their guide. Nothing is compiled yet.

    A guide that they have already says how outputs reason. Raises RequestError that names the field at fault.
    """
    structured, guide = params.structured_outputs, params.guide
    if structured is None:
        is_idle = guide is not None and guide.grammar is None and guide.max_reasoning_tokens is None
        return replace(params, guide=None) if is_idle else params
    field = structured.place
    if guide is not None and guide.grammar is not None:
        raise _refusal(field, "cannot stand beside a choice of tools that is enforced; send one of them")
    if prompter.tokenizer is None:
        raise _refusal(field, "needs a tokenizer, but this model has no tokenizer.json", "unsupported_field")
    if not prompter.eos_token_ids:
        raise _refusal(field, "needs an end-of-sequence token, but this model names none", "unsupported_field")
    try:
        grammar = grammar_of(structured, prompter.tokenizer)
        grammar.text.encode()
    except SchemaError as error:
        raise RequestError(f"{field}: {error}", param=field, code="unsupported_schema") from None
    except UnicodeEncodeError:
        raise _refusal(field, "holds a lone surrogate, which is not valid Unicode; remove it") from None
    except ValueError as error:
        raise _refusal(field, f"cannot be read: {error}") from None
    except RecursionError:
        raise _refusal(field, "cannot be read: it nests too deeply") from None
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise _refusal(field, f"has {len(grammar.text)} characters, but may have {MAX_GRAMMAR_CHARS}")
    guide = replace(guide or Guide(), grammar=grammar, field=field)
    return replace(params, structured_outputs=None, guide=guide)


def _refusal(field: str, problem: str, code: str | None = None) -> RequestError:
    return RequestError(f"{field} {problem}", param=field, code=code)


def grammar_of(structured: StructuredOutputsParams, tokenizer: Tokenizer) -> Grammar:
    """Write structured outputs as a grammar. Raises SchemaError, ValueError or RecursionError."""
    if structured.regex is not None:
        return Grammar("regex", without_anchors(structured.regex))
    if structured.choice is not None:
        return Grammar("regex", "|".join(map(literal, structured.choice)))
    if structured.grammar is not None:
        if is_gbnf(structured.grammar):
            return Grammar("gbnf", with_characters(structured.grammar))
        return Grammar("lark", structured.grammar)
    options = json_options(structured)
    if structured.structural_tag is not None:
        return lark_of(read_object(structured.structural_tag), options, tokenizer)
    schema = ANY_OBJECT if structured.json is None else read_object(structured.json)
    return Grammar("json_schema", json.dumps(prepare(schema, options, structured.disable_additional_properties)))


def json_options(structured: StructuredOutputsParams | None = None) -> dict[str, Any]:
    """Return llguidance's options for JSON; without arguments those of every JSON that nobody says more of."""
    if structured is not None and structured.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = None if structured is None else structured.whitespace_pattern
    return {"whitespace_pattern": WHITESPACE if pattern is None else pattern}


def read_object(given: Any) -> Mapping[str, Any]:
    """Return a mapping, or the one that a JSON text holds. Raises ValueError."""
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise ValueError("it must be a JSON object")
    return found


def without_anchors(regex: str) -> str:
    """Drop `^` at the start and `$` at the end, which change nothing where the whole output must match."""
    regex = regex.removeprefix("^")
    bare = regex.removesuffix("$")
    num_backslashes = len(bare) - len(bare.rstrip("\\"))
    return regex if num_backslashes % 2 else bare


def checked(params: SamplingParams) -> SamplingParams:
    """Return parameters whose grammar compiles, in a form that workers read. Takes time. Raises RequestError."""
    guide = params.guide
    if guide is None or guide.grammar is None:
        return params
    try:
        grammar = _checked(guide.grammar)
    except RequestError as error:
        raise RequestError(f"{guide.field}: {error}", param=guide.field, code=error.error_code) from None
    return replace(params, guide=replace(guide, grammar=grammar))


@functools.lru_cache(CHECKED)
def _checked(grammar: Grammar) -> Grammar:
    return schema_errors.checked(grammar)


def lark_of(tag: Mapping[str, Any], options: Mapping[str, Any], tokenizer: Tokenizer) -> Grammar:
    """Return the grammar of `{"format": {...}}`, or of the older `{"structures": [...], "triggers": [...]}`.

    In the older form, text is free until a trigger; then one of the structures that begin with it must follow, and text
    again. Special tokens are matched as tokens. Raises ValueError, and SchemaError for a schema.
    """
    given = tag["format"] if "format" in tag else _triggered_tags(tag)
    _check_known(tag, "it", {"type", "format"} if "format" in tag else {"type", "structures", "triggers"})
    return FormatWriter(options, tokenizer).grammar(given)


def _triggered_tags(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("it must have a format, or lists of structures and triggers")
    if len(structures) > MAX_STRUCTURES:
        raise ValueError(f"it has {len(structures)} structures, but may have {MAX_STRUCTURES}")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": [_tag(i, each) for i, each in enumerate(structures)],
    }


def _tag(i: int, structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping) or not structure.keys() >= _FIELDS:
        raise ValueError(f"structures[{i}] is {brief(structure)}, but must have begin, schema and end")
    _check_known(structure, f"structures[{i}]", _FIELDS)
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


def _check_known(given: Mapping[str, Any], place: str, fields: set[str]) -> None:
    if unknown := sorted(map(str, given.keys() - fields)):
        raise ValueError(f"{place} has {brief(unknown[0])}, but may have {', '.join(sorted(fields))}")
