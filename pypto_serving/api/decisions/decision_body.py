"""Describe and read the body of POST /v1/decisions. Raises RequestError that names the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from pypto_serving.api.chat.formats import Message
from pypto_serving.api.common.body import (
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    Body,
    FieldRules,
    IgnoredFields,
    ReadBody,
    Shown,
    parse_json,
)
from pypto_serving.api.common.described import MAY_TEXT, TEXT, list_of, object_of, text, typed
from pypto_serving.api.decisions.questions import (
    MAX_LEVELS,
    MAX_NAME_CHARS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Question,
    read_input,
    read_questions,
)
from pypto_serving.api.generation.labels import Asked, LabelTree
from pypto_serving.api.generation.request import MAX_CHOICES, FittedPrompt, MaxTokens, fit_params, fit_prompt
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams


def _content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [TEXT, list_of({"anyOf": list(parts)})]}


_WORDS = typed("input_text", {"text": TEXT})
_JSON = typed("input_json", {"data": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}})
_SAID = [typed("output_text", {"text": TEXT}), typed("refusal", {"refusal": TEXT})]
_MESSAGE = {"const": "message"}
_ITEMS = [
    object_of({"role": {"const": "user"}, "content": _content(_WORDS, _JSON)}, type=_MESSAGE),
    object_of({"role": {"enum": ["developer", "system"]}, "content": _content(_WORDS)}, type=_MESSAGE),
    object_of({"role": {"const": "assistant"}, "content": _content(*_SAID)}, type=_MESSAGE),
    typed("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
    typed("function_call_output", {"call_id": TEXT, "output": _content(_WORDS)}),
    typed("custom_tool_call", {"call_id": TEXT, "name": TEXT, "input": TEXT}),
    typed("custom_tool_call_output", {"call_id": TEXT, "output": _content(_WORDS)}),
]
_NAME = {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS}
_ASKED = {"instructions": _content(_WORDS, _JSON)}
_CHOICE = object_of({"value": {"type": ["string", "boolean"]}}, description=MAY_TEXT)
_LEVEL = object_of({"label": TEXT}, description=MAY_TEXT)
_QUESTIONS = [
    typed("predicate", _ASKED, name=_NAME),
    typed("choice", {**_ASKED, "choices": list_of(_CHOICE, 2, MAX_OPTIONS)}, name=_NAME),
    typed("score", {**_ASKED, "levels": list_of(_LEVEL, 2, MAX_LEVELS)}, name=_NAME),
]
INPUT = WithJsonSchema({"anyOf": [TEXT | {"minLength": 1}, list_of({"anyOf": _ITEMS}, 1, MAX_MESSAGES)]})
QUESTIONS = WithJsonSchema(list_of({"anyOf": _QUESTIONS}, 1, MAX_QUESTIONS))


class DecisionBody(Body):
    """The body of POST /v1/decisions. `prompt_cache_key` is a cache salt: it separates prefix caches."""

    rules: ClassVar[FieldRules] = FieldRules(
        {"stream": (False,)}, frozenset({"prompt_cache_options", "safety_identifier"})
    )
    """`prompt_cache_options` has no effect, since all prefixes are cached."""

    model: str | None = None
    input: Annotated[Any, INPUT]
    questions: Annotated[list[Any], QUESTIONS] = Field(fail_fast=True, max_length=MAX_QUESTIONS)
    prompt_cache_key: Annotated[str | None, text(0, MAX_SALT_CHARS)] = Field(None, max_length=MAX_SALT_CHARS)


MAX_READ_TOKENS = 1 << 21
"""Limit of tokens of all prompts of a request; they take 8 MiB, and a few seconds to encode."""
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""Turns thinking off, under both names that templates use."""


def read_decision(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode; return one prompt for each read."""
    body = parse_json(raw, DecisionBody)
    text, questions = read_input(body.input), read_questions(body.questions)
    asked, prompts, named = _reads(prompter, text, questions)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=tuple(named))
    return ReadBody(
        model=serving.resolve_model(body.model),
        ignored=IgnoredFields.of(body.unknown_fields()),
        shown=Shown(tokens_as_ids=True),
        prompts=prompts,
        params=fit_params(params, prompter),
        cache_salt=body.prompt_cache_key or "",
        asked=asked,
    )


def _reads(
    prompter: Prompter, text: str, questions: Sequence[Question]
) -> tuple[list[Asked], list[FittedPrompt], list[int]]:
    """Return the questions, the prompt of each read, and the ids of all tokens whose log-probability is read."""
    asked: list[Asked] = []
    prompts: list[FittedPrompt] = []
    named: dict[int, None] = {}
    num_tokens = 0
    most = min(MAX_CHOICES, prompter.config.max_unfinished)
    for question, ids in zip(questions, _encoded(prompter, text, questions), strict=True):
        tree = _tree(prompter, question)
        at = len(prompts)
        paths = [[(at + read, token_id) for read, token_id in path] for path in tree.paths]
        asked.append(Asked(question.kind, question.name, question.values, paths))
        named |= dict.fromkeys(token_id for path in paths for _, token_id in path)
        prompts += [
            fit_prompt([*ids, *begun], MaxTokens(1), prompter.config, prompt_field="input") for begun in tree.nodes
        ]
        num_tokens += sum(len(ids) + len(begun) for begun in tree.nodes)
        if len(prompts) > most or num_tokens > MAX_READ_TOKENS:
            problem = f"these questions need more than {most} prompts, or {MAX_READ_TOKENS} tokens in all"
            raise RequestError(f"{problem}; ask fewer, or with fewer choices", param="questions")
    return asked, prompts, list(named)


def _encoded(prompter: Prompter, text: str, questions: Sequence[Question]) -> Iterator[list[int]]:
    """Iterate over the prompts of the questions.

    The shared part with the input is encoded only once. So it has the same tokens in all prompts, and all but the first
    prompt find it in the prefix cache.
    """
    shared = f"<input>\n{text}\n</input>\n\n"
    begun: dict[str, list[int]] = {}
    prompter.check_length(len(text), "input")
    for question in questions:
        asked = question.text()
        prompter.check_length(len(asked), "questions")
        prompt = _rendered(prompter, {"role": "user", "content": shared + asked})
        if isinstance(prompt, str):
            end = prompt.find(shared) + len(shared) if shared in prompt else 0
            head, rest = prompt[:end], prompt[end:]
            if head and head not in begun:
                begun = {head: prompter.encode_text(head, "input", add_special_tokens=False)}
            yield begun.get(head, []) + prompter.encode_text(rest, "input", add_special_tokens=False)
        else:
            yield prompter.check_token_ids(prompt, "input")


def _rendered(prompter: Prompter, message: Message) -> str | list[int]:
    """Render a chat of one message, to be answered without thinking. Raises RequestError if thinking stays on."""
    chat = prompter.render([message], _NO_THOUGHTS)
    if chat.new_parser is not None and chat.new_parser.thinking is not None and chat.new_parser.thinking.opened:
        problem = "this model's chats begin with reasoning that cannot be turned off, so it cannot make decisions"
        raise RequestError(problem, code="decisions_unavailable")
    return chat.prompt


def _tree(prompter: Prompter, question: Question) -> LabelTree:
    tokenizer = prompter.tokenizer
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer.json, so it cannot make decisions", code="decisions_unavailable"
        )
    return LabelTree([tokenizer.encode(label, False) for label in question.labels])
