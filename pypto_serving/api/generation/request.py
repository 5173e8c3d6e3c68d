"""Make the prompts, parameters and engine requests of a generation, for all endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.leaving_out import LeftOut
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.chat.tools import ToolUse, part_text, refuse
from pypto_serving.api.generation.logprobs import (
    MAX_LOGPROBS_OF_ANSWER,
    CollectedPromptLogprobs,
    check_num_prompt_logprobs,
)
from pypto_serving.api.grammars.structured import with_chat_guide, with_guide
from pypto_serving.api.http.tracing import RequestTrace
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.service import SeedSource
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ContextLengthError, RequestError
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams, check_named_ids
from pypto_serving.util import brief

MAY_LACK_CONTENT = frozenset({"assistant", "tool", "function"})
"""Roles whose messages may omit `content`."""
_PARTS = {"text": "text", "refusal": "refusal"}
MAX_TIMEOUT_S = 86_400
MAX_CHOICES = 512
"""Limit of choices, over all prompts of a request, since the event loop creates all of them at once."""


class FittedPrompt(msgspec.Struct, frozen=True):
    """A prompt and its `max_tokens`, which fit the context together. Made by `fit_prompt`.

    `packed_ids`: its token ids, packed by `pack_ids`; `num_cut` tokens before them were cut off. `text` is kept if the
    answer repeats it; None if token ids were given.
    """

    packed_ids: bytes
    max_tokens: int
    num_cut: int = 0
    text: str | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """Return a view of the token ids."""
        return memoryview(self.packed_ids).cast("i")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts to continue together. Choices are numbered prompt by prompt.

    `id` begins the id of each engine request. `params` come from `fit_params`; `params.n` is the number of choices per
    prompt. Lower `priority` is served earlier. Requests with equal `cache_salt` share cached prefixes.
    `timeout_s` is the client's; at the monotonic time `deadline_s`, unfinished choices end.
    `http_id` names the HTTP request in logs; `trace` records how the request ends.
    `keep_token_ids`, `tokens_as_ids`, `thinking`: see Choice. `prompt_logprobs` come from `new_prompt_logprobs`.
    """

    id: str
    prompts: Sequence[FittedPrompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    keep_token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: Sequence[CollectedPromptLogprobs] = ()
    thinking: Thinking | None = None
    timeout_s: float | None = None
    deadline_s: float | None = None
    http_id: str = ""
    trace: RequestTrace | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of choices of all prompts."""
        return self.params.n * len(self.prompts)


def check_num_choices(num_choices: int, num_prompts: int, config: EngineConfig) -> None:
    """Raise RequestError if `num_choices` choices of `num_prompts` prompts are too many even for an idle server."""
    param = "prompt" if num_prompts > 1 else "n"
    if num_choices > MAX_CHOICES:
        message = f"the request makes {num_choices} sequences, but must make at most {MAX_CHOICES}; send several"
        raise RequestError(message, param=param)
    if num_choices > config.max_unfinished:
        raise RequestError(
            f"the request makes {num_choices} sequences, but this server runs {config.limits.max_num_seqs} at once "
            f"and queues {config.scheduler.max_queued_requests}; ask for fewer",
            param=param,
        )


def fit_params(params: SamplingParams, prompter: Prompter, new_parser: OutputFormat | None = None) -> SamplingParams:
    """Return the parameters of a request, with bad words as token ids and structured outputs as a guide.

    Special tokens stay in the text if the parser needs them. Raises RequestError if a parameter names a token id
    outside the vocabulary, and the errors of `encode_bad_words` and `with_guide`.
    """
    params = with_guide(encode_bad_words(params, prompter.tokenizer), prompter)
    check_named_ids(params, prompter.config.model.vocab_size)
    if params.skip_special_tokens and new_parser is not None and new_parser.shows_special:
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params


class MaxTokens(NamedTuple):
    """How many output tokens a client asks for, in its `field`.

    - `asked`, else `default`: so many, cut to what fits the context. With `strict`, `asked` must fit.
    - else: what fits.
    """

    asked: int | None = None
    field: str = "max_tokens"
    default: int | None = None
    strict: bool = False

    @classmethod
    def of_chat(cls, serving: ServingConfig, asked: int | None, field: str) -> MaxTokens:
        """Return those of a chat, with the server's defaults."""
        return cls(asked, field, serving.default_sampling.max_tokens, serving.strict_max_tokens)

    def fit(self, num_prompt: int, max_model_len: int, prompt_field: str = "prompt") -> int:
        """Return how many tokens may be generated after `num_prompt` prompt tokens.

        Raises ContextLengthError about `prompt_field` if the prompt leaves no room for one token, and about `field` if
        `asked` does not fit though it must.
        """
        room = max_model_len - num_prompt
        if room < 1:
            raise ContextLengthError(
                max_model_len,
                f"However, the prompt resulted in {num_prompt} tokens and leaves no room for an output token; shorten "
                "it",
                param=prompt_field,
                num_tokens=num_prompt,
            )
        if self.asked is not None and self.asked > room and self.strict:
            raise ContextLengthError(
                max_model_len,
                f"However, you requested {num_prompt + self.asked} tokens ({num_prompt} in the messages, {self.asked} "
                f"in the completion); shorten the prompt or ask for at most {room} tokens",
                param=self.field,
                num_tokens=num_prompt,
            )
        limit = self.default if self.asked is None else self.asked
        return room if limit is None else min(limit, room)


WHAT_FITS = MaxTokens()


def fit_prompt(
    token_ids: Sequence[int],
    max_tokens: MaxTokens,
    config: EngineConfig,
    *,
    prompt_field: str = "prompt",
    truncate_to: int | None = None,
    keeps_start: bool = False,
    text: str | None = None,
) -> FittedPrompt:
    """Make a FittedPrompt whose max_tokens fits the context; see `truncate`, and `MaxTokens.fit` for the errors."""
    most = config.limits.max_model_len
    if truncate_to == -1:  # which leaves room for max_tokens
        max_tokens = max_tokens._replace(strict=True)
    token_ids, num_cut = truncate(token_ids, truncate_to, max_tokens.asked, most, keeps_start)
    fitting = max_tokens.fit(len(token_ids), most, prompt_field)
    return FittedPrompt(pack_ids(token_ids), fitting, num_cut, None if num_cut else text)


def check_prompt_logprobs(prompts: Sequence[FittedPrompt], params: SamplingParams) -> None:
    """Raise RequestError if the log-probabilities of the prompts are too many for one answer."""
    if params.prompt_logprobs is not None:
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        check_num_prompt_logprobs(num_tokens, params.n, params.prompt_logprobs)


def fit_num_logprobs(prompts: Sequence[FittedPrompt], params: SamplingParams, asked: int | None) -> list[FittedPrompt]:
    """Limit `max_tokens` of prompts so that the outputs' log-probabilities fit one answer.

    `asked`: the client's own max_tokens, which is not lowered. Raises RequestError if it is too large.
    """
    if params.logprobs is None:
        return list(prompts)
    num_choices, most = params.n * len(prompts), max(prompt.max_tokens for prompt in prompts)
    width = len(params.logprob_token_ids) or params.logprobs
    fitting = MAX_LOGPROBS_OF_ANSWER // (num_choices * (1 + width))
    if asked is None and fitting > 0:
        return [msgspec.structs.replace(prompt, max_tokens=min(prompt.max_tokens, fitting)) for prompt in prompts]
    if most > fitting:
        each = f"up to {most} tokens each with {width} others"
        message = f"log-probabilities of {num_choices} choices of {each} may be more than {MAX_LOGPROBS_OF_ANSWER}"
        advice = "send a lower max_tokens, ask for fewer of them, or stream"
        raise RequestError(f"{message}; {advice}", param="logprobs")
    return list(prompts)


def new_prompt_logprobs(prompts: Sequence[FittedPrompt], params: SamplingParams) -> Sequence[CollectedPromptLogprobs]:
    """Make a collector of log-probabilities for each prompt; () unless `params` ask for them."""
    return () if params.prompt_logprobs is None else [CollectedPromptLogprobs(prompt.token_ids) for prompt in prompts]


def engine_requests(
    request: GenerationRequest, seeds: SeedSource, eos_token_ids: tuple[int, ...], arrival_s: float
) -> list[EngineRequest]:
    """Make one engine request for each choice, in order.

    Choices of a prompt share its seed and token ids. All choices share the parameters, without stop strings, which this
    process finds itself. Only the first choice of a prompt asks for the log-probabilities of the prompt. Raises
    RequestError if `min_tokens` does not fit.
    """
    made: list[EngineRequest] = []
    known: dict[int, tuple[SamplingParams, SamplingParams]] = {}
    for prompt in request.prompts:
        seed = seeds.seed_of(request.params)
        if prompt.max_tokens not in known:
            first = msgspec.structs.replace(request.params, n=1, stop=(), max_tokens=prompt.max_tokens)
            others = first
            if first.prompt_logprobs is not None:
                others = msgspec.structs.replace(first, prompt_logprobs=None)
            known[prompt.max_tokens] = first, others
        for choice in range(request.params.n):
            params = known[prompt.max_tokens][choice > 0]
            made.append(
                EngineRequest(
                    request_id=f"{request.id}-{len(made)}",
                    token_ids=prompt.packed_ids,
                    params=params,
                    eos_token_ids=eos_token_ids,
                    seed=seed,
                    choice=choice,
                    priority=request.priority,
                    arrival_s=arrival_s,
                    deadline_s=request.deadline_s,
                    cache_salt=request.cache_salt,
                    http_id=request.http_id,
                )
            )
    return made


def encode_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Add `bad_words` to `bad_word_ids`, each encoded with and without a leading space.

    Raises RequestError if bad words have too many tokens, or if there is no tokenizer.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        refuse("bad_words", "needs a tokenizer, which this model lacks; leave it out")
    words = [word.lstrip() for word in params.bad_words]
    found = [tuple(tokenizer.encode(text, False)) for word in words for text in (word, " " + word)]
    sequences = tuple(dict.fromkeys(filter(None, [*params.bad_word_ids, *found])))
    return msgspec.structs.replace(params, bad_words=(), bad_word_ids=sequences)


def truncate(
    token_ids: Sequence[int],
    limit: int | None,
    max_tokens: int | None,
    max_model_len: int,
    keeps_start: bool = False,
) -> tuple[Sequence[int], int]:
    """Return the kept end of a prompt, or its start if `keeps_start`, and how many tokens were cut off.

    Keep `limit` tokens; all for None. For -1, keep as many as fit the context together with `max_tokens` output
    tokens, or with one output token if that is None.
    """
    if limit is None:
        return token_ids, 0
    if limit < 0:
        limit = max(1, max_model_len - max(1, 1 if max_tokens is None else max_tokens))
    num_cut = max(0, len(token_ids) - limit)
    return token_ids[: len(token_ids) - num_cut] if keeps_start else token_ids[num_cut:], num_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to answer.

    - `messages`, `kwargs`: what ChatEncoder.encode takes, but for the tools; the client's field is `messages_field`
    - `keeps_start`: a prompt that is truncated loses its end
    - `thinking_budget`: most tokens of reasoning
    - `hides_reasoning`: no part of the answer is reasoning
    - `stream`: log-probabilities need not fit one answer
    """

    messages: Sequence[Mapping[str, Any]]
    kwargs: Mapping[str, Any]
    params: SamplingParams
    tools: ToolUse
    messages_field: str = "messages"
    max_tokens: MaxTokens = WHAT_FITS
    keeps_start: bool = False
    add_special_tokens: bool = False
    thinking_budget: int | None = None
    hides_reasoning: bool = False
    stream: bool = False


def encode_chat(prompter: Prompter, chat: ChatRequest) -> tuple[list[int], OutputFormat | None]:
    """Render and encode a conversation; return its token ids, and the format of its outputs, None for plain text.

    Raises RequestError that names the field at fault.
    """
    prompter.check_length(sum(len(message["content"]) for message in chat.messages), chat.messages_field)
    tools = chat.tools.described()
    encoded = prompter.render(chat.messages, {**chat.kwargs, **({"tools": tools} if tools else {})})
    ids = prompter.encode_chat(encoded, chat.messages_field, chat.add_special_tokens)
    form = encoded.new_parser
    if form is not None:
        calls, exact = form.calls, bool(chat.tools.forced) or any(f.get("strict") for f in chat.tools.functions)
        calls = calls if calls is None else replace(calls, one=not chat.tools.parallel, exact=exact)
        form = replace(form, calls=calls, hides_reasoning=chat.hides_reasoning)
    return ids, form


def fit_chat(prompter: Prompter, chat: ChatRequest) -> tuple[FittedPrompt, SamplingParams, OutputFormat | None]:
    """Encode the prompt, fit it to the context, and add the guide of the output. Raises RequestError."""
    ids, form = encode_chat(prompter, chat)
    params = chat.params
    prompt = fit_prompt(
        ids,
        chat.max_tokens,
        prompter.config,
        prompt_field=chat.messages_field,
        truncate_to=params.truncate_prompt_tokens,
        keeps_start=chat.keeps_start,
    )
    check_prompt_logprobs([prompt], params)
    if not chat.stream:
        (prompt,) = fit_num_logprobs([prompt], params, chat.max_tokens.asked)
    guided = with_chat_guide(params, prompter, form, chat.tools, chat.thinking_budget)
    return prompt, fit_params(guided, prompter, form), form


def read_message(message: Any, where: str, left_out: LeftOut | None = None) -> dict[str, Any]:
    """Return a message for encoders: `content` is text, with text parts joined, "" where it may be left out.

    In place of other parts stands what `left_out` says; without it they are refused.
    """
    if not isinstance(message, Mapping):
        example = "{'role': 'user', 'content': 'Hello'}"
        allowed = f"a message with role and content, such as {example}"
        refuse(where, f"is {brief(message)}, but must be {allowed}", "invalid_type")
    role, content = message.get("role"), message.get("content")
    if role is None or (content is None and role not in MAY_LACK_CONTENT):
        refuse(f"{where}.{'role' if role is None else 'content'}", "is missing; send a string", "missing_field")
    if not isinstance(role, str):
        refuse(f"{where}.role", f"is {brief(role)}, but must be a string", "invalid_type")
    if isinstance(content, list | tuple):
        content = "\n".join(
            part_text(part, f"{where}.content[{i}]", _PARTS, left_out) for i, part in enumerate(content)
        )
    if not isinstance(content, str | None):
        complaint = f"is {brief(content)}, but must be a string or a list of text parts"
        refuse(f"{where}.content", complaint, "invalid_type")
    return {**message, "content": content or ""}
