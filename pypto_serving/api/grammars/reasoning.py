"""Say where the reasoning of an output begins and ends, for those who follow it token by token."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.thinking import Thinking
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Reasoning


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
