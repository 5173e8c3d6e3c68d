"""Say what an output must match, where its reasoning ends, and how long that may be."""

from __future__ import annotations

from pypto_serving.api.chat.parsers.thinking import Thinking
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.guide import Grammar, Guide, Reasoning


def make_guide(
    grammar: Grammar | None, thinking: Thinking | None, budget: int | None, tokenizer: Tokenizer
) -> Guide | None:
    """Return the guide of outputs with the `grammar` after at most `budget` tokens of reasoning; None for no limits."""
    if grammar is None and (thinking is None or budget is None):
        return None
    reasoning = None if thinking is None else reasoning_ids(thinking, tokenizer)
    return Guide(grammar, reasoning, budget if reasoning is not None else None)


def reasoning_ids(thinking: Thinking, tokenizer: Tokenizer) -> Reasoning:
    """Return the token ids of the marks of reasoning."""
    begin = () if thinking.opened else _ids(thinking.start, tokenizer)
    return Reasoning(begin, _ids(thinking.end, tokenizer))


def _ids(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    single = tokenizer.raw.token_to_id(mark)
    return tuple(tokenizer.encode(mark, add_special_tokens=False)) if single is None else (single,)
