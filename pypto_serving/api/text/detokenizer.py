"""Decode one output token by token."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from pypto_serving.api.text.tokenizer import REPLACEMENT, Tokenizer


class Detokenizer:
    """Decode one output token by token. Owned by its choice.

    The pieces returned by `push` and `flush`, joined, are the decoded output. A character is never split; an incomplete
    one is held back. The cost of a token does not grow with the output: after `HELD_LIMIT` tokens without a complete
    end, decoding continues in a window, and returns all but the last three undecodable characters.
    Tokens that are `silent` have no text.
    """

    CONTEXT = 6
    HELD_LIMIT = 16
    WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        self._skip_special = skip_special_tokens
        self.silent = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[int] = []
        self._held: list[int] = []
        self._shown = 0
        self._stream: DecodeStream | None = None
        context = list(prompt_ids[-self.CONTEXT :])
        self._restart([] if self._decode(context).endswith(REPLACEMENT) else context)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, often "" for a part of a character."""
        if token_id in self.silent:
            return ""
        if not self._held and (whole := self._whole_text(token_id)) is not None:
            return whole
        self._held.append(token_id)
        if self._stream is None:
            return self._push_in_window()
        try:
            text = self._stream.step(self._tokenizer.raw, token_id)
        except Exception:  # DecodeStream refuses decoders that change text it has returned before
            text = None
            self._stream = None
        if text is not None:
            self._context, self._held = self._held, []
            return text
        if len(self._held) >= self.HELD_LIMIT or self._stream is None:
            self._stream = None
            return self._push_in_window()
        return ""

    def flush(self) -> str:
        """End the output; return the text held back. Incomplete characters become U+FFFD."""
        text = self._held_text()[self._shown :] if self._held else ""
        self._restart([])
        return text

    def _restart(self, context: list[int]) -> None:
        self._context = context
        self._held = []
        self._shown = 0
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special)

    def _push_in_window(self) -> str:
        text = self._held_text()
        end = _certain_chars(text)
        new, self._shown = text[self._shown : end], max(self._shown, end)
        if end == len(text):
            self._restart((self._context + self._held)[-self.WINDOW :])
        elif len(self._held) > 2 * self.WINDOW:
            self._context, self._held = [], self._held[-self.WINDOW :]
            self._shown = _certain_chars(self._decode(self._held))
        return new

    def _held_text(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special) if ids else ""


def _certain_chars(text: str) -> int:
    """Count the characters of decoded `text` that no later token can change; at most three bytes are incomplete."""
    undecodable = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(undecodable, 3)
