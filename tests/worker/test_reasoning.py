"""Where reasoning begins and ends: the guide of a row and the parser of its text must agree on it."""

from __future__ import annotations

import codecs
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.chat.parsers.scanner import OutputScanner, Thinking, read_reasoning
from pypto_serving.types.guide import Reasoning
from pypto_serving.worker.reasoning import ReasoningState, TokenTexts

BEGIN, END, CALL = "<think>", "</think>", "<tool_call>\n<function="
PIECES = [BEGIN, END, CALL, "<tool_call>", "\n", " ", "\u3000", "a", "é", "<", "think>", "</", ">", "\n<function="]


def reasoning(
    begin: str = BEGIN, end: str = END, begin_ids: Sequence[int] = (), end_ids: Sequence[int] = ()
) -> Reasoning:
    return Reasoning(begin, end, (CALL,), tuple(begin_ids), tuple(end_ids))


def cut(text: str, rng: random.Random) -> list[bytes]:
    """Tokens of 1 to 9 bytes, which may end within a character."""
    data, tokens = text.encode(), []
    while data:
        size = rng.randrange(1, 10)
        tokens.append(data[:size])
        data = data[size:]
    return tokens


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans(), st.integers(0, 1000))
def test_guide_and_parser_agree(pieces: list[str], opened: bool, seed: int) -> None:
    """After every token of any text, cut anywhere."""
    tokens = cut("".join(pieces), random.Random(seed))
    state = ReasoningState(reasoning("" if opened else BEGIN), None, TokenTexts(tokens))
    scanner = OutputScanner()
    reader = read_reasoning(scanner, Thinking(BEGIN, END, opened, (CALL,)))
    done = next(reader, scanner) is scanner
    decoder = codecs.getincrementaldecoder("utf-8")()
    for i, token in enumerate(tokens):
        state.push(i)
        scanner.text += decoder.decode(token)
        done = done or next(reader, scanner) is scanner
        only_breaks = not scanner.text.strip("\r\n")  # which the parser drops at the beginning of the content
        assert done == (state.stage == "content") or (not done and only_breaks), tokens[: i + 1]
        if not opened and not done and not only_breaks:
            assert scanner.inside == (state.stage == "reasoning"), tokens[: i + 1]
        if done:
            content = b"".join(tokens[j] for j in state.content_ids).decode(errors="replace")
            assert scanner.text in content if state.content_ids else not scanner.text.startswith(CALL)
            return


def test_a_call_in_the_reasoning_is_content() -> None:
    tokens = [b"why", b"<tool_call>", b"\n", b"<", b"function", b"=get", b"_weather"]
    state = ReasoningState(reasoning(""), 3, TokenTexts(tokens))
    for i in range(6):
        assert state.stage == "reasoning"
        state.push(i)
    assert state.stage == "content" and state.content_ids == (1, 2, 3, 4, 5) and state.forced() == ()


@pytest.mark.parametrize("end", [(7,), (7, 8), (7, 7, 8), (7, 8, 7, 9), (7, 8, 9, 7, 8, 7)])
@pytest.mark.parametrize("most", [0, 1, 4])
def test_a_budget_forces_what_is_missing_of_the_end(end: tuple[int, ...], most: int) -> None:
    """One token at a time or all at once, for every way to reason."""
    texts = TokenTexts([bytes([ord("a") + i]) for i in range(10)])
    marks = Reasoning("", "".join(chr(ord("a") + i) for i in end), (), (), end)
    for thoughts in itertools.product((5, 7, 8), repeat=most):
        one, all_at_once = (ReasoningState(marks, most, texts) for _ in range(2))
        output: list[int] = []
        for token in thoughts:
            if one.stage == "reasoning":
                assert one.forced() == ()
                one.push(token)
                all_at_once.push(token)
                output.append(token)
        for token in all_at_once.forced():
            all_at_once.push(token)
        while one.stage == "reasoning":
            output.append(one.forced()[0])
            one.push(output[-1])
        assert all_at_once.stage == "content"
        assert tuple(output[-len(end) :]) == end and len(output) <= most + len(end)


def test_an_opening_is_offered_behind_white_space() -> None:
    tokens = [b"\n", b"<", b"think>", b"x", b"<t"]
    marks = reasoning(begin_ids=(1, 2))
    for output, offered, stage in (
        ((), 1, "opening"),
        ((0, 0), 1, "opening"),
        ((0, 1), 2, "opening"),
        ((4,), None, "opening"),
        ((0, 1, 2), None, "reasoning"),
        ((0, 3), None, "content"),
    ):
        state = ReasoningState(marks, 0, TokenTexts(tokens))
        for token in output:
            assert state.forced() == ()
            state.push(token)
        assert state.stage == stage
        if stage == "opening":
            assert state.opening_id == offered


def test_tokens_that_go_beyond_the_end_are_known() -> None:
    tokens = [b"x", b"</think>", b"</think>\n", b"a</think>b", b"</", b"think", b">", b">\n", b"k>", b"k>>", b"think>!"]
    tokens += [CALL.encode()[:-1], b"=", b"=get"]
    state = ReasoningState(reasoning(""), None, TokenTexts(tokens))
    for pushed, beyond in ((0, {2, 3}), (4, {2, 3, 10}), (5, {2, 3, 7}), (0, {2, 3})):
        state.push(pushed)
        assert set(state.beyond()) == beyond
    state.push(11)
    assert set(state.beyond()) == {2, 3, 13} and state.stage == "reasoning"
