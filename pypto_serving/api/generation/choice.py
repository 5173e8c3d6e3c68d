"""Turn the tokens of one choice into text and logprobs; find its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pypto_serving.api.chat.parsers.scanner import ReasoningCount
from pypto_serving.api.generation.logprobs import TokenEntry, token_entry
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.text.detokenizer import Detokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.arrays import id_list
from pypto_serving.types.request import EngineRequest, RequestOutput, Timeline
from pypto_serving.types.tier import TIERS


class StopPatterns:
    """The stop strings of a request, longest first, with their failure tables. Shared by all choices.

    `shown`: keep the found stop string in the text.
    """

    def __init__(self, stops: Sequence[str], shown: bool = False) -> None:
        self.shown = shown
        self.patterns = [(stop, _failure_table(stop)) for stop in sorted(stops, key=len, reverse=True)]


class StopStrings:
    """Finds the first of several stop strings in a text that arrives in pieces. Owned by one choice.

    The match that ends first wins; of matches with the same end, the longest. How the text is cut does not matter. Text
    is held back only while it may begin a stop string. `matched`: the string found; later text is dropped.
    """

    def __init__(self, stops: StopPatterns) -> None:
        self._patterns, self._shown = stops.patterns, stops.shown
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text; return the text that is certain not to belong to a stop string, or all if stop strings are shown.

        Without `may_end`, ignore stop strings that end in `text`, but not one that only begins there.
        """
        if self.matched is not None:
            return ""
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            found = self._advance(char)
            if found is not None and may_end:
                self.matched = found
                return self._release(end if self._shown else end - len(found))
        return self._release(len(self._held) - (0 if self._shown else max(self._states, default=0)))

    def flush(self) -> str:
        """End the text; return the text held back."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _advance(self, char: str) -> str | None:
        """Advance each pattern's automaton (Knuth, Morris, Pratt 1977) by one character; return the pattern found."""
        states, found = self._states, None
        for i, (pattern, failure) in enumerate(self._patterns):
            state = states[i]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                found = found or pattern
                state = failure[-1]
            states[i] = state
        return found


def _failure_table(pattern: str) -> list[int]:
    """Return, for each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table


ONE_ID = 4
"""Bytes of one token id."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New text of a choice, from engine outputs. `logprobs` and `token_ids` are None unless the request asked for them.

    `stop_reason` is the stop string, or the id of the stop token, that ended the choice.
    """

    index: int
    text: str
    logprobs: list[TokenEntry] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class Choice:
    """Detokenizes one sequence, finds its stop strings and counts its tokens. Owned by its Generation.

    `prompt` is the index of its prompt in the request. `last_s` is the arrival of the last output, and `replica` the
    index of the engine; Generation sets them.
    `timeline` has the engine's times so far.
    With `keep_token_ids`, deltas have the output tokens and a stop token. With `tokens_as_ids`, log-probabilities have
    no texts of tokens. `num_reasoning` counts the tokens of the reasoning that `thinking` describes, `num_drafts` the
    verified drafts, and `num_accepted` the accepted ones among the tokens.
    """

    def __init__(
        self,
        index: int,
        made: EngineRequest,
        wanted: GenerationRequest,
        tokenizer: Tokenizer | None,
        stops: StopPatterns | None = None,
    ) -> None:
        params = made.params
        self.index = index
        self.prompt = index // wanted.params.n
        prompt_ids = wanted.prompts[self.prompt].token_ids
        self.request_id = made.request_id
        self.num_prompt = len(prompt_ids)
        self.last_s = made.arrival_s
        self.replica = 0
        self.num_tokens = 0
        self.num_cached = 0
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_reasoning = 0
        self.cached_by_tier: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.timeline: Timeline | None = None
        self._pending_ids: list[int] | None = [] if wanted.keep_token_ids else None
        self._min_tokens = params.min_tokens
        self._texts = None if wanted.tokens_as_ids else tokenizer
        self._shows_stop = params.include_stop_str_in_output
        skip = params.skip_special_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids, skip)
        self._silent = frozenset() if self._detokenizer is None else self._detokenizer.silent
        self._stops = None if stops is None else StopStrings(stops)
        self._entries: list[TokenEntry] | None = None if params.logprobs is None else []
        self._num_chars = 0
        self._reasoning = None if wanted.thinking is None else ReasoningCount(wanted.thinking)
        self._plain = self._stops is None and self._entries is None and not wanted.keep_token_ids
        self._push_plain = self._plain_push()

    def begin(self, output: RequestOutput) -> None:
        """Record data that comes with the first token: the times so far, and the cached prompt tokens by tier."""
        self.timeline = output.timeline
        self.cached_by_tier = output.cached_by_tier

    def take(self, output: RequestOutput) -> Delta | None:
        """Add an engine output; return the delta to send, or None if there is nothing to show yet.

        Sets `finish_reason` with the last delta. If a stop string was found, the caller must abort the sequence.
        """
        data, reason = output.token_ids, output.finish_reason
        if output.num_cached_tokens > self.num_cached:
            self.num_cached = output.num_cached_tokens
        self.num_drafts += output.num_drafts
        if self._push_plain is not None and reason is None and len(data) == ONE_ID:
            self.num_tokens += 1
            text = self._push_plain(int.from_bytes(data, "little"))
            return Delta(self.index, text, None, None) if text else None
        return self._take_any(id_list(data), output)

    def _take_any(self, ids: Sequence[int], output: RequestOutput) -> Delta | None:
        """Add any number of tokens, with stop strings, logprobs and the end of the sequence.

        The stop token that ended the sequence counts, but is shown only if the request asks for it. Tokens after a stop
        string do not count.
        """
        text, reason, before = "", output.finish_reason, self.num_tokens
        self.cached_by_tier = output.cached_by_tier or self.cached_by_tier
        self.timeline = output.timeline or self.timeline
        last = len(ids) - 1 if reason == "stop" else -1
        silent = bool(ids) and ids[last] == output.stop_token_id and not self._shows_stop
        silent_at = last if silent else -1
        for i, token_id in enumerate(ids):
            self.num_tokens += 1
            if self._entries is not None and output.logprobs is not None:
                ends = i == last and (i == silent_at or token_id in self._silent)
                values = output.logprobs[i]
                self._entries.append(token_entry(token_id, values, self._texts, self._num_chars, ends))
            if i != silent_at:
                text += self._push(token_id)
            if self._matched is not None:
                reason = "stop"
                break
        added = self.num_tokens - before
        self.num_accepted += min(output.num_accepted, added)
        if self._pending_ids is not None:
            self._pending_ids += ids[:added]
        if reason is not None:
            text += self._flush()
            self.finish_reason = reason if self._matched is None else "stop"
        elif not text:
            return None
        entries, self._entries = self._entries, None if self._entries is None else []
        taken, self._pending_ids = self._pending_ids, None if self._pending_ids is None else []
        stop_reason = output.stop_token_id if self._matched is None else self._matched
        return Delta(self.index, text, entries, self.finish_reason, stop_reason, taken)

    @property
    def _matched(self) -> str | None:
        """Return the found stop string, or None."""
        return None if self._stops is None else self._stops.matched

    def _push(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        if self._reasoning is not None:
            self._count_reasoning(self._reasoning, text)
        return text if self._stops is None else self._stops.push(text, self.num_tokens > self._min_tokens)

    def _count_reasoning(self, count: ReasoningCount, text: str) -> None:
        """Count one token, with its text, unless the reasoning has ended."""
        count.push(text)
        self.num_reasoning = count.num_tokens
        if count.done:
            self._reasoning = None
            self._push_plain = self._plain_push()

    def _plain_push(self) -> Callable[[int], str] | None:
        """Return the function that decodes a token, if the request needs only text; else None."""
        if self._detokenizer is None or self._reasoning is not None or not self._plain:
            return None
        return self._detokenizer.push

    def _flush(self) -> str:
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._stops is None:
            return text
        return self._stops.push(text, self.num_tokens > self._min_tokens) + self._stops.flush()


class ChoiceOutput:
    """Collects all deltas of one choice. `logprobs` and `token_ids` stay None unless the request asked for them."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TokenEntry] | None = None
        self.token_ids: list[int] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self.texts.append(delta.text)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)
        if delta.token_ids is not None:
            self.token_ids = [] if self.token_ids is None else self.token_ids
            self.token_ids.extend(delta.token_ids)

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(self.texts)


class TokenUsage(msgspec.Struct, frozen=True):
    """Token counts of a generation. A prompt's tokens count once, however many choices it has.

    `cached_by_tier` splits `num_cached_tokens` by `types.tier.TIERS`; it counts only finished prompts.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    cached_by_tier: tuple[int, ...]
    num_reasoning_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


def count_usage(choices: Sequence[Choice]) -> TokenUsage:
    """Sum tokens over all choices. The tokens of a prompt are taken from its first choice."""
    firsts = list({choice.prompt: choice for choice in reversed(choices)}.values())
    by_tier = [choice.cached_by_tier for choice in firsts if choice.cached_by_tier]
    return TokenUsage(
        num_prompt_tokens=sum(choice.num_prompt for choice in firsts),
        num_output_tokens=sum(choice.num_tokens for choice in choices),
        num_cached_tokens=sum(choice.num_cached for choice in firsts),
        cached_by_tier=tuple(map(sum, zip(*by_tier, strict=True))) if by_tier else (0,) * len(TIERS),
        num_reasoning_tokens=sum(choice.num_reasoning for choice in choices),
        num_accepted_drafts=sum(choice.num_accepted for choice in choices),
        num_rejected_drafts=sum(choice.num_drafts - choice.num_accepted for choice in choices),
    )
