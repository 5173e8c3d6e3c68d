"""Make the guide of a request: its structure; for chats also its tool calls and the marks of reasoning."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.chat.tools import ToolUse, refuse
from pypto_serving.api.grammars import schema_errors
from pypto_serving.api.grammars.gbnf import RULE, with_characters
from pypto_serving.api.grammars.grammar_text import literal
from pypto_serving.api.grammars.json_schema import WHITESPACE, SchemaError, prepare
from pypto_serving.api.grammars.tag_format import lark_of
from pypto_serving.api.grammars.tool_grammar import calls_beside_json, either, forced_calls, strict_calls
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import MAX_GRAMMAR_CHARS, Grammar, Guide, Reasoning
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.structured import StructuredOutputsParams

ANY_OBJECT = {"type": "object"}
CHECKED = 16
"""Remember this many grammars that compile."""


def with_guide(params: SamplingParams, prompter: Prompter) -> SamplingParams:
    """Convert `structured_outputs` to the grammar of the parameters' guide. Nothing is compiled yet.

    A guide in `params` describes the reasoning of outputs. Raises RequestError that names the field at fault.
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


def with_chat_guide(
    params: SamplingParams, prompter: Prompter, form: OutputFormat | None, tools: ToolUse, budget: int | None = None
) -> SamplingParams:
    """Add the guide of a chat's output: its reasoning, its tool calls, its structure.

    - If calls are forced, a `response_format` has no effect.
    - If the model may call, the structure applies to outputs without calls. It must be JSON or a structural tag. A tag
      is the whole grammar; it may contain calls.

    Raises RequestError that names the field at fault.
    """
    structured = params.structured_outputs
    if tools.forced and structured is not None and structured.field == "response_format":
        params, structured = replace(params, structured_outputs=None), None
    calls = _calls(prompter, form, tools, structured)
    thinking = None if form is None else form.thinking
    budget = None if thinking is None else budget
    if calls is None and structured is None and budget is None:
        return params
    tokenizer = prompter.tokenizer
    reasoning = None if thinking is None or tokenizer is None else _reasoning(thinking, tokenizer)
    guide = Guide(None if structured is not None and not tools.forced else calls, reasoning, budget, "tools")
    made = with_guide(replace(params, guide=guide), prompter)
    grammar = None if made.guide is None else made.guide.grammar
    if calls is None or structured is None or grammar is None or made.guide is None:
        return made
    return replace(made, guide=replace(made.guide, grammar=either(calls, grammar.text)))


def _calls(
    prompter: Prompter, form: OutputFormat | None, tools: ToolUse, structured: StructuredOutputsParams | None
) -> Grammar | None:
    """Return the grammar of the calls that the request demands, or None if it restricts no calls."""
    strict = next((function["name"] for function in tools.functions if function.get("strict")), None)
    if structured is not None and tools.functions and not tools.forced:
        _check_beside(structured, strict)
        if structured.structural_tag is not None:
            return None
    if not tools.forced and strict is None and not (structured is not None and tools.functions):
        return None
    tokenizer = prompter.tokenizer
    if form is None or form.calls is None or tokenizer is None:
        if tools.forced:
            refuse("tool_choice", "cannot be enforced: the form of this model's calls is not known; set it to 'auto'")
        if strict is not None:
            problem = f"cannot be enforced: {strict} is strict, but the form of this model's calls is not known"
            refuse("tools", f"{problem}; leave strict out")
        return None
    if not prompter.eos_token_ids:
        refuse("tool_choice", "cannot be enforced: this model names no end-of-sequence token; set it to 'auto'")
    call_form, one = FAMILIES[form.calls.family], not tools.parallel
    functions = [f for f in tools.functions if not tools.forced or f["name"] in tools.forced]
    write = forced_calls if tools.forced else strict_calls if structured is None else calls_beside_json
    options = json_options(None if tools.forced else structured)
    return write(call_form, functions, one, tokenizer.special_id, options)


def _check_beside(structured: StructuredOutputsParams, strict: str | None) -> None:
    """Refuse a structure beside optional tools if it would make calls impossible."""
    kinds = [kind for kind in ("regex", "choice", "grammar") if getattr(structured, kind) is not None]
    if kinds:
        problem = f"({kinds[0]}) leaves no room for calls of the tools"
        raise structured.refusal(f"{problem}; set tool_choice to 'none', or send JSON or a structural tag")
    if structured.structural_tag is not None and strict is not None:
        raise structured.refusal(f"(structural_tag) holds in place of strict of {strict}; leave one of them out")


def _reasoning(thinking: Thinking, tokenizer: Tokenizer) -> Reasoning:
    """Return the marks of reasoning with their token ids. Raises RequestError if the tokenizer cannot write them."""
    begin = "" if thinking.opened else thinking.start
    return Reasoning(begin, thinking.end, thinking.calls, _ids(begin, tokenizer), _ids(thinking.end, tokenizer))


def _ids(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    single = tokenizer.raw.token_to_id(mark)
    if single is not None:
        return (single,)
    ids = tuple(tokenizer.encode(mark, add_special_tokens=False))
    if mark.encode() not in b"".join(map(tokenizer.token_bytes, ids)):
        problem = f"this model's tokenizer cannot write {mark}, so nothing can be enforced beside reasoning"
        raise RequestError(f"{problem}; leave out thinking_token_budget and structured outputs")
    return ids


def _refusal(field: str, problem: str, code: str | None = None) -> RequestError:
    return RequestError(f"{field} {problem}", param=field, code=code)


def grammar_of(structured: StructuredOutputsParams, tokenizer: Tokenizer) -> Grammar:
    """Write structured outputs as a grammar. Raises SchemaError, ValueError or RecursionError."""
    if structured.regex is not None:
        return Grammar("regex", without_anchors(structured.regex))
    if structured.choice is not None:
        return Grammar("regex", "|".join(map(literal, structured.choice)))
    if structured.grammar is not None:
        if RULE.search(structured.grammar):
            return Grammar("gbnf", with_characters(structured.grammar))
        return Grammar("lark", structured.grammar)
    options = json_options(structured)
    if structured.structural_tag is not None:
        return lark_of(read_object(structured.structural_tag), options, tokenizer)
    schema = ANY_OBJECT if structured.json is None else read_object(structured.json)
    return Grammar("json_schema", json.dumps(prepare(schema, options, structured.disable_additional_properties)))


def json_options(structured: StructuredOutputsParams | None = None) -> dict[str, Any]:
    """Return llguidance's JSON options; without an argument, the default options."""
    if structured is not None and structured.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = None if structured is None else structured.whitespace_pattern
    return {"whitespace_pattern": WHITESPACE if pattern is None else pattern}


def read_object(given: Any) -> Mapping[str, Any]:
    """Return a mapping, or parse one from JSON text. Raises ValueError."""
    found = json.loads(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise ValueError("it must be a JSON object")
    return found


def without_anchors(regex: str) -> str:
    """Drop `^` at the start and `$` at the end, which have no effect since the whole output must match."""
    regex = regex.removeprefix("^")
    bare = regex.removesuffix("$")
    num_backslashes = len(bare) - len(bare.rstrip("\\"))
    return regex if num_backslashes % 2 else bare


def checked(params: SamplingParams) -> SamplingParams:
    """Compile the grammar, and return parameters with it in a syntax that workers read. Slow. Raises RequestError."""
    guide = params.guide
    if guide is None or guide.grammar is None:
        return params
    try:
        grammar = _checked(guide.grammar)
    except RequestError as error:
        raise RequestError(f"{guide.field}: {error}", param=guide.field, code=error.code) from None
    return replace(params, guide=replace(guide, grammar=grammar))


@functools.lru_cache(CHECKED)
def _checked(grammar: Grammar) -> Grammar:
    return schema_errors.checked(grammar)
