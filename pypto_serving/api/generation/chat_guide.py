"""Make outputs of chats be tool calls where a request demands it, and say where their reasoning ends."""

from __future__ import annotations

from msgspec.structs import replace

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.guide import reasoning_of
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.tools import ToolUse, refuse
from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.generation.structured import json_options, with_guide
from pypto_serving.api.generation.tool_grammar import either, forced_calls, strict_calls
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.types.sampling import SamplingParams


def with_chat_guide(
    params: SamplingParams, prompter: Prompter, form: OutputFormat | None, tools: ToolUse, budget: int | None = None
) -> SamplingParams:
    """Return parameters with the guide of a chat's output: its reasoning, its calls, its structure.

    - Where calls are forced, a `response_format` has nothing to say of.
    - Where the model may call, the structure is that of other outputs.

    Raises RequestError that names the field at fault.
    """
    structured = params.structured_outputs
    if tools.forced and structured is not None and structured.field == "response_format":
        params, structured = replace(params, structured_outputs=None), None
    calls = _calls(prompter, form, tools, structured is not None)
    thinking = None if form is None else form.thinking
    budget = None if thinking is None else budget
    if calls is None and structured is None and budget is None:
        return params
    tokenizer = prompter.tokenizer
    reasoning = None if thinking is None or tokenizer is None else reasoning_of(thinking, tokenizer)
    guide = Guide(None if structured is not None and not tools.forced else calls, reasoning, budget, "tools")
    made = with_guide(replace(params, guide=guide), prompter)
    grammar = None if made.guide is None else made.guide.grammar
    if calls is None or structured is None or grammar is None or made.guide is None:
        return made
    if grammar.syntax != "json_schema":
        return made
    return replace(made, guide=replace(made.guide, grammar=either(calls, grammar.text)))


def _calls(prompter: Prompter, form: OutputFormat | None, tools: ToolUse, beside_structure: bool) -> Grammar | None:
    """Return the grammar of calls that the request demands; None if it demands nothing of them."""
    strict = any(function.get("strict") for function in tools.functions)
    if not tools.forced and not strict and not (beside_structure and tools.functions):
        return None
    tokenizer = prompter.tokenizer
    if form is None or form.calls is None or tokenizer is None:
        if tools.forced:
            refuse("tool_choice", "cannot be enforced: the form of this model's calls is not known; set it to 'auto'")
        return None
    if not prompter.eos_token_ids:
        refuse("tool_choice", "cannot be enforced: this model names no end-of-sequence token; set it to 'auto'")
    call_form, one = FAMILIES[form.calls.family].form, not tools.parallel
    functions = [f for f in tools.functions if not tools.forced or f["name"] in tools.forced]
    options = json_options()
    if tools.forced or beside_structure:
        return forced_calls(call_form, functions, one, tokenizer.special_id, options)
    return strict_calls(call_form, functions, one, tokenizer.special_id, options)
