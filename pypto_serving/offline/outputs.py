"""Describe what the offline API returns, and make it of a finished generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.parsers.scanner import ParsedCall, read_output
from pypto_serving.api.generation.choice import ChoiceOutput
from pypto_serving.api.generation.logprobs import TokenEntry


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token at its position; `rank` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs[i]` maps token ids at position i to their values, the chosen token included.

    `text` leaves out `reasoning` and `tool_calls` if the model family marks them in its chats. `stop_reason` is the
    stop string, or the id of the stop token, that ended the choice.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    reasoning: str = ""
    tool_calls: Sequence[ParsedCall] = ()
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What `generate` and `chat` return for one prompt. `prompt` is None if token ids were given.

    `prompt_logprobs[i]` maps token ids at position i of the prompt to their values, the prompt's own token included;
    None for the first, which nothing precedes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def completion_output(output: ChoiceOutput, new_parser: OutputFormat | None) -> CompletionOutput:
    """Describe the output of a finished choice, which kept its token ids; `new_parser` makes the parser of its text."""
    index, ids, reason = output.index, output.token_ids or [], output.finish_reason or "abort"
    logprobs = None if output.logprobs is None else list(map(_logprobs_by_id, output.logprobs))
    if new_parser is None:
        return CompletionOutput(index, output.text, ids, logprobs, reason, stop_reason=output.stop_reason)
    read = read_output(new_parser(), output.texts)
    parsed = read.reasoning, read.tool_calls
    return CompletionOutput(index, read.content, ids, logprobs, reason, *parsed, stop_reason=output.stop_reason)


def prompt_logprobs(entries: Iterable[TokenEntry]) -> list[dict[int, Logprob] | None]:
    """Describe the log-probabilities of a prompt."""
    return [_logprobs_by_id(entry) if entry.scored else None for entry in entries]


def _logprobs_by_id(entry: TokenEntry) -> dict[int, Logprob]:
    return {
        token.token_id: Logprob(token.logprob, token.rank, (token.utf8 or b"").decode(errors="replace"))
        for token in (*entry.top, entry.chosen)
    }
