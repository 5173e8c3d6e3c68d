"""Read the body of POST /v1/decisions. Raises RequestError that names the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pypto_serving.api.chat.formats import Message
from pypto_serving.api.common.body import IgnoredFields, ReadBody, Shown, parse_json
from pypto_serving.api.decisions.inputs import read_input
from pypto_serving.api.decisions.questions import Question, read_questions
from pypto_serving.api.decisions.schemas import DecisionBody
from pypto_serving.api.generation.labels import Asked, LabelTree, encode_labels
from pypto_serving.api.generation.request import MAX_CHOICES, FittedPrompt, fit_params, fit_prompt
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams

MAX_READ_TOKENS = 1 << 21
"""Tokens of all prompts of a request: they take 8 MiB, and a few seconds to encode."""
_NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
"""Both names that templates have for it."""


def read_decision(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> ReadBody:
    """Parse, check, render and encode: a prompt for each read."""
    body = parse_json(raw, DecisionBody)
    text, questions = read_input(body.input), read_questions(body.questions)
    asked, prompts, named = _reads(prompter, text, questions)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=tuple(named))
    return ReadBody(
        model=serving.resolve_model(body.model),
        stream=False,
        ping_s=None,
        ignored=IgnoredFields.of(body.unknown_fields()),
        shown=Shown(tokens_as_ids=True),
        prompts=prompts,
        params=fit_params(params, prompter),
        priority=0,
        cache_salt=body.prompt_cache_key or "",
        asked=asked,
    )


def _reads(
    prompter: Prompter, text: str, questions: Sequence[Question]
) -> tuple[list[Asked], list[FittedPrompt], list[int]]:
    """Return what is asked, the prompt of each read, and the ids of all tokens that are read."""
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
        prompts += [fit_prompt([*ids, *begun], 1, prompter.config, prompt_field="input") for begun in tree.nodes]
        num_tokens += sum(len(ids) + len(begun) for begun in tree.nodes)
        if len(prompts) > most or num_tokens > MAX_READ_TOKENS:
            problem = f"so many questions need more than {most} prompts, or {MAX_READ_TOKENS} tokens in all"
            raise RequestError(f"{problem}; ask fewer, or with fewer choices", param="questions")
    return asked, prompts, list(named)


def _encoded(prompter: Prompter, text: str, questions: Sequence[Question]) -> Iterator[list[int]]:
    """Iterate over the prompts of the questions.

    The part with the input, which they share, is encoded once. So it has the same tokens in all of them, and each one
    but the first finds it in the prefix cache.
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
    """Render a chat of one message, to be answered at once. Raises RequestError if the model thinks first."""
    chat = prompter.chat_encoder.encode([message], _NO_THOUGHTS)
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
    return encode_labels(question.labels, lambda label: tokenizer.encode(label, False))
