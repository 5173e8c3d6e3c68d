"""What rows with a guide may choose: reasoning, grammars, both, and the threads that follow them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pypto_serving import guidance
from pypto_serving.errors import RequestError
from pypto_serving.guidance import Compiler
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import pack_ids
from pypto_serving.worker import grammars as kept
from pypto_serving.worker.grammars import Grammars
from pypto_serving.worker.guides import RowGuides, Told
from pypto_serving.worker.masks import RowMasks
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide
from tests.checkpoints import NUM_BYTES, SPECIAL_TOKENS, byte_ids, write_tokenizer

VOCAB_SIZE = 320
END = NUM_BYTES + 2
NAMES = ["a<|im_end|>", "b"]
SCHEMA = {"properties": {"name": {"enum": NAMES}}, "required": ["name"], "type": "object", "maxProperties": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def compiler(model: Path) -> Compiler:
    return Compiler.of(str(model), VOCAB_SIZE, [END])


class Bytes:
    """Encodes text with the tokenizer of one token per byte."""

    def __init__(self, compiler: Compiler) -> None:
        self._tokenizer = compiler._tokenizer

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.tokenize_str(text)

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_str(list(ids))


@pytest.fixture(scope="module")
def code(compiler: Compiler) -> Bytes:
    return Bytes(compiler)


def allowed(guide: RowGuide) -> set[int]:
    """The tokens that may follow."""
    if guide.forced:
        return {guide.forced[0]}
    if guide.mask is None:
        return set(range(VOCAB_SIZE))
    return set(np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little"))[:VOCAB_SIZE].tolist())


def opened(compiler: Compiler, guide: Guide, jumps: bool = False, output: Sequence[int] = ()) -> RowGuide:
    made, texts = RowGuide(guide, (END,), jumps), TokenTexts(compiler.tokens)
    made.open(None if guide.grammar is None else compiler.compile(guide.grammar), compiler.num_words, texts)
    made.advance(output)
    return made


def walk(guide: RowGuide, rng: random.Random, most: int = 200) -> list[int]:
    """A random output of a row that is guided, up to its end."""
    output: list[int] = []
    while END not in output and len(output) < most:
        assert guide.fault is None
        tokens = list(guide.forced) or [rng.choice(sorted(allowed(guide)))]
        output += tokens
        guide.advance(tokens)
    return output


def reasoning(begin: str, end: str, *calls: str) -> Reasoning:
    return Reasoning(begin, end, calls, byte_ids(begin), byte_ids(end))


GUIDES = {
    "schema": Guide(Grammar("json_schema", json.dumps(SCHEMA))),
    "regex": Guide(Grammar("regex", "[ab]{2,5}(xyz|xyw)")),
    "lark": Guide(Grammar("lark", 'start: "a" start? "b"')),
    "token": Guide(Grammar("lark", f'start: "a" <[{NUM_BYTES}]> "b" {SPECIAL_TOKENS[0]}')),
    "after": Guide(Grammar("regex", "[0-9]{2}"), reasoning("", "bc"), 5),
    "maybe after": Guide(Grammar("regex", "[0-9a]{3}"), reasoning("bb", "c"), 5),
    "budget": Guide(None, reasoning("", "bc"), 3),
}


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("jumps", [True, False])
def test_a_row_that_starts_anew_goes_on_as_before(compiler: Compiler, name: str, jumps: bool) -> None:
    """After any number of its tokens: the same mask, the same forced tokens."""
    rng = random.Random(0)
    for _ in range(5):
        guide = opened(compiler, GUIDES[name], jumps)
        output: list[int] = []
        while END not in output and len(output) < 30:
            anew = opened(compiler, GUIDES[name], jumps, output)
            assert (allowed(anew), anew.forced, anew.is_done) == (allowed(guide), guide.forced, guide.is_done)
            tokens = list(guide.forced) or [rng.choice(sorted(allowed(guide)))]
            guide.advance(tokens)
            output += tokens


@pytest.mark.parametrize("name", ["schema", "regex", "lark", "token"])
def test_jumps_change_no_answer(compiler: Compiler, code: Bytes, name: str) -> None:
    for seed in range(20):
        texts = [code.text(walk(opened(compiler, GUIDES[name], jumps), random.Random(seed))) for jumps in (True, False)]
        if name == "schema":
            for text in texts:
                assert json.loads(text.removesuffix(SPECIAL_TOKENS[2]))["name"] in NAMES
        assert all(text.endswith(SPECIAL_TOKENS[2]) for text in texts)


def test_text_that_looks_like_a_special_token_is_text(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, Guide(Grammar("json_schema", json.dumps({"const": SPECIAL_TOKENS[2]}))), jumps=True)
    output = walk(guide, random.Random(0))
    assert output == [*code.ids(f'"{SPECIAL_TOKENS[2]}"'), END]
    assert END not in output[:-1]


def test_nothing_but_the_end_follows_a_complete_grammar(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, Guide(Grammar("regex", "ab?")), output=code.ids("a"))
    assert allowed(guide) == {END, *code.ids("b")}
    for more in (code.ids("b"), [END], [END]):
        guide.advance(more)
        assert allowed(guide) == {END}


def test_reasoning_is_free_but_for_the_end_of_the_sequence(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, GUIDES["after"])
    assert allowed(guide) == set(range(VOCAB_SIZE)) - {END}
    guide.advance([65, 66])
    assert allowed(guide) == set(code.ids("0123456789"))


def test_an_output_may_open_with_reasoning_or_begin_at_once(compiler: Compiler, code: Bytes) -> None:
    digits = set(code.ids("0123456789a"))
    guide = opened(compiler, GUIDES["maybe after"])
    assert allowed(guide) == {65, *digits}
    guide.advance(code.ids("1"))
    assert allowed(guide) == digits
    guide = opened(compiler, GUIDES["maybe after"], output=[65])
    assert allowed(guide) == {65} | (digits if 65 in digits else set())
    guide.advance([65, 5, 66])
    assert allowed(guide) == digits


def test_a_call_ends_the_reasoning_and_begins_the_content(compiler: Compiler, code: Bytes) -> None:
    marks = reasoning("", "bc", "<c>")
    guide = opened(compiler, Guide(Grammar("lark", 'start: "<c>" "fg"? "x"'), marks), output=code.ids("zz<c>"))
    assert guide.fault is None and allowed(guide) == set(code.ids("fx"))
    guide = opened(compiler, Guide(Grammar("lark", 'start: "(c)"'), marks), output=code.ids("zz<c>"))
    assert guide.fault is not None and guide.fault.status == 400


def test_content_begins_with_a_token(compiler: Compiler, code: Bytes) -> None:
    guide, texts = RowGuide(GUIDES["after"], (END,), False), TokenTexts([*compiler.tokens[:-1], b"c\n"])
    assert guide.guide.grammar is not None
    guide.open(compiler.compile(guide.guide.grammar), compiler.num_words, texts)
    guide.advance(code.ids("b"))
    assert allowed(guide) == set(range(VOCAB_SIZE - 1)) - {END}


def test_a_guide_without_a_grammar_ends(compiler: Compiler) -> None:
    guide = opened(compiler, GUIDES["budget"], jumps=True, output=[5, 5, 65])
    assert guide.forced == byte_ids("c") and not guide.is_done
    guide.advance(guide.forced)
    assert guide.is_done and guide.mask is None and guide.forced == ()


def test_a_token_that_does_not_match_is_a_fault(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, GUIDES["regex"], output=code.ids("z"))
    assert guide.fault is not None and guide.fault.status == 400


def test_the_grammars_of_a_worker_are_few(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Grammars(str(model), VOCAB_SIZE)
    for i in range(kept.MAX_GRAMMARS + 5):
        found.compile(Grammar("regex", f"a{{{i}}}b"), (END,))
    assert len(found) == kept.MAX_GRAMMARS
    assert found.find(Grammar("regex", "a{4}b"), (END,)) is None
    last = Grammar("regex", f"a{{{kept.MAX_GRAMMARS + 4}}}b")
    assert found.find(last, (END,)) is found.compile(last, (END,))
    monkeypatch.setattr(kept, "MAX_CHARS", 10)
    found.compile(Grammar("regex", "[abcdefghijklmnop]"), (END,))
    assert len(found) == 1


def row_sampling(guide: Guide, **changes: Any) -> RowSampling:
    return RowSampling(guide=guide, eos_ids=pack_ids([END]), **changes)


def told_ready(guides: RowGuides, rows: Sequence[int]) -> Told:
    """What guides tell once all are ready."""
    while True:
        told = guides.tell(np.array(rows, np.int32))
        assert told is not None
        if not told.withheld:
            return told


def test_counted_repetitions_take_little_memory(model: Path) -> None:
    """They unfold while a mask is computed; what was unfolded stays with a grammar that is kept."""
    found, before = Grammars(str(model), VOCAB_SIZE), psutil.Process().memory_info().rss
    for letter in "abcdefgh":
        matcher = found.compile(Grammar("regex", f"((({letter}{{100}}){{100}}){{100}})"), (END,))
        matcher.copy().fill(np.zeros(found.num_words, np.uint32))
    assert psutil.Process().memory_info().rss - before < 400 << 20


def test_rows_wait_for_their_grammar_and_hold_up_nobody(model: Path, code: Bytes) -> None:
    masks = RowMasks(4, VOCAB_SIZE)
    guides = RowGuides(Grammars(str(model), VOCAB_SIZE), masks)
    assert guides.tell(np.array([0, 1], np.int32)) is None
    guides._grammars.texts((END,))
    held = guides._grammars._preparing
    with held:  # a tokenizer is being prepared
        guides.start(1, row_sampling(GUIDES["regex"]), [])
        guides.start(2, row_sampling(GUIDES["budget"]), [])
        told = guides.tell(np.array([0, 1], np.int32))
        assert told is not None and told.withheld == {1} and not told.faults
        assert masks.find(np.array([1], np.int32)).tolist() == [-1]
        assert told_ready(guides, [0, 2]).forced == {}
    told = told_ready(guides, [0, 1])
    assert told.guides.keys() == {1} and masks.find(np.array([0, 1], np.int32)).tolist() == [-1, 1]
    guides.follow(np.array([0, 1], np.int32), told, np.array([1, 1], np.int32), np.array([5, *code.ids("a")], np.int32))
    assert told_ready(guides, [1]).guides[0].output == code.ids("a")
    guides.clear(1)
    assert guides.tell(np.array([0, 1], np.int32)) is None


def test_a_grammar_that_only_the_tokenizer_refuses_is_a_fault(model: Path) -> None:
    guides = RowGuides(Grammars(str(model), VOCAB_SIZE), RowMasks(4, VOCAB_SIZE))
    guides.start(0, row_sampling(Guide(Grammar("lark", "start: <unheard_of>"))), [])
    fault = told_ready(guides, [0]).faults[0]
    assert (fault.status, fault.code) == (400, "invalid_grammar") and "unheard_of" in str(fault)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a?){500}a{500}"),
        Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
        Grammar("lark", 'start: a{1000000}\na: "x"'),
    ],
)
def test_a_grammar_beyond_the_limits_ends_its_row(model: Path, grammar: Grammar) -> None:
    """It compiles; but a token that it allows is one too many. An end of the output is no way out."""
    guides, rng = RowGuides(Grammars(str(model), VOCAB_SIZE), RowMasks(4, VOCAB_SIZE)), random.Random(0)
    guides.start(0, row_sampling(Guide(grammar)), [])
    for _ in range(30):
        told = told_ready(guides, [0])
        if told.faults:
            assert (told.faults[0].status, told.faults[0].error_code) == (400, "invalid_grammar")
            return
        tokens = list(told.forced.get(0, ())) or [rng.choice(sorted(allowed(told.guides[0]) - {END}))]
        guides.follow(np.array([0], np.int32), told, np.array([len(tokens)], np.int32), np.array(tokens, np.int32))
    raise AssertionError("nothing was too many")


def test_what_others_did_with_a_grammar_changes_nothing(model: Path, code: Bytes) -> None:
    """A matcher that fails starts over with one of its own; here the one that is shared stands elsewhere."""
    grammars = Grammars(str(model), VOCAB_SIZE)
    guide = GUIDES["regex"]
    assert guide.grammar is not None
    grammars.compile(guide.grammar, (END,)).consume(code.ids("b")[0])
    shared = grammars.find(guide.grammar, (END,))
    assert shared is not None
    for token in code.ids("bbbb"):
        shared.consume(token)
    guides = RowGuides(grammars, RowMasks(4, VOCAB_SIZE))
    guides.start(0, row_sampling(guide), code.ids("ab"))
    told = told_ready(guides, [0])
    assert not told.faults and allowed(told.guides[0]) == set(code.ids("abx"))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("lark", "start: x"), "unknown name"),
        (Grammar("gbnf", "root ::= ("), "GBNF"),
        (Grammar("json_schema", '{"type": "object", "not": {}}'), "not"),
        (Grammar("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}'), "nsatisfiable"),
    ],
)
def test_errors_say_in_one_line_what_is_wrong(grammar: Grammar, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        guidance.checked(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_special_tokens_are_left_to_the_tokenizer() -> None:
    for text in ('start: <|tool|> "a"', 'start: <[100000]> "a"'):
        grammar = Grammar("lark", text)
        assert guidance.checked(grammar) == grammar
