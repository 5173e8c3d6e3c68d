"""Describe what the offline API returns, and make it of a finished generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pypto_serving.api.chat.output import NewParser, ToolCall, read_output
from pypto_serving.api.generation.choice import Choice
from pypto_serving.api.generation.logprobs import ScoredToken, TokenEntry
from pypto_serving.api.generation.output import Output


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token at its position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs[i]` maps token ids at position i to their values, the chosen token included.

    `text` leaves out `reasoning` and `tool_calls` if the model family marks them in its chats.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What `generate` and `chat` return for one prompt. `prompt` is None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int


def completion_output(choice: Choice, output: Output, new_parser: NewParser | None) -> CompletionOutput:
    """Describe a finished choice, which kept its token ids; `new_parser` makes the parser of its text."""
    index, ids, reason = choice.index, choice.token_ids or [], output.finish_reason or "abort"
    logprobs = None if output.logprobs is None else list(map(_logprobs_by_id, output.logprobs))
    if new_parser is None:
        return CompletionOutput(index, output.text, ids, logprobs, reason)
    read = read_output(new_parser(), output.texts)
    return CompletionOutput(index, read.content, ids, logprobs, reason, read.reasoning, read.tool_calls)


def _logprobs_by_id(entry: TokenEntry) -> dict[int, Logprob]:
    return {token.token_id: _logprob(token) for token in (*entry.top, entry.chosen)}


def _logprob(token: ScoredToken) -> Logprob:
    return Logprob(token.logprob, token.rank, (token.utf8 or b"").decode(errors="replace"))
