"""Say by token ids where the reasoning of an output begins and ends."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.thinking import Thinking
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import Reasoning


def reasoning_ids(thinking: Thinking, tokenizer: Tokenizer) -> Reasoning:
    """Return the token ids of the marks of reasoning."""
    begin = () if thinking.opened else _ids(thinking.start, tokenizer)
    return Reasoning(begin, _ids(thinking.end, tokenizer))


def _ids(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    single = tokenizer.raw.token_to_id(mark)
    return tuple(tokenizer.encode(mark, add_special_tokens=False)) if single is None else (single,)
