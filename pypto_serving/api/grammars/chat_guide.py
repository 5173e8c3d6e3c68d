"""Make outputs of chats be tool calls where a request demands it, and say where their reasoning ends."""

from __future__ import annotations

from msgspec.structs import replace

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.chat.tools import ToolUse, refuse
from pypto_serving.api.grammars.structured import json_options, with_guide
from pypto_serving.api.grammars.tool_grammar import calls_beside_json, either, forced_calls, strict_calls
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.structured import StructuredOutputsParams


def with_chat_guide(
    params: SamplingParams, prompter: Prompter, form: OutputFormat | None, tools: ToolUse, budget: int | None = None
) -> SamplingParams:
    """Return parameters with the guide of a chat's output: its reasoning, its calls, its structure.

    - Where calls are forced, a `response_format` has nothing to say of.
    - Where the model may call, the structure is that of other outputs. It is JSON, or a structural tag, which is all
      that holds then: it may have the calls.

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
    reasoning = None if thinking is None or tokenizer is None else reasoning_of(thinking, tokenizer)
    guide = Guide(None if structured is not None and not tools.forced else calls, reasoning, budget, "tools")
    made = with_guide(replace(params, guide=guide), prompter)
    grammar = None if made.guide is None else made.guide.grammar
    if calls is None or structured is None or grammar is None or made.guide is None:
        return made
    return replace(made, guide=replace(made.guide, grammar=either(calls, grammar.text)))


def _calls(
    prompter: Prompter, form: OutputFormat | None, tools: ToolUse, structured: StructuredOutputsParams | None
) -> Grammar | None:
    """Return the grammar of calls that the request demands; None if it demands nothing of them."""
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
    """Refuse a structure beside tools that the model may call, if it would leave no room for calls."""
    kinds = [kind for kind in ("regex", "choice", "grammar") if getattr(structured, kind) is not None]
    if kinds:
        problem = f"({kinds[0]}) leaves no room for calls of the tools"
        raise structured.refusal(f"{problem}; set tool_choice to 'none', or send JSON or a structural tag")
    if structured.structural_tag is not None and strict is not None:
        raise structured.refusal(f"(structural_tag) holds in place of strict of {strict}; leave one of them out")


def reasoning_of(thinking: Thinking, tokenizer: Tokenizer) -> Reasoning:
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
