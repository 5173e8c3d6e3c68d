"""What rows with a guide may choose: reasoning, grammars, and both."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pypto_serving import guidance
from pypto_serving.errors import RequestError
from pypto_serving.guidance import Compiler, GrammarError
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.types.guide import Grammar, Guide, Reasoning
from pypto_serving.types.sampler import MaskArray
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import NextTokens, RowGuide
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


def ids_of(mask: MaskArray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:VOCAB_SIZE].tolist())


def allowed(guide: RowGuide) -> set[int]:
    """The tokens that may follow."""
    choice = guide.choice()
    if choice.forced:
        return {choice.forced[0]}
    return set(range(VOCAB_SIZE)) if choice.mask is None else ids_of(choice.mask)


def opened(compiler: Compiler, guide: Guide, jumps: bool = False, output: Sequence[int] = ()) -> RowGuide:
    grammar = guide.grammar
    matcher = None if grammar is None else compiler.compile(grammar)
    made = RowGuide(guide, (END,), matcher, np.zeros(compiler.num_words, np.uint32), jumps, TokenTexts(compiler.tokens))
    made.open()
    for token in output:
        made.append(token)
    return made


def walk(guide: RowGuide, rng: random.Random, most: int = 200) -> list[int]:
    """A random output of a row that is guided, up to its end."""
    output: list[int] = []
    while END not in output and len(output) < most:
        tokens = guide.choice().forced or [rng.choice(sorted(allowed(guide)))]
        for token in tokens:
            guide.append(token)
        output += tokens
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
            anew, choice = opened(compiler, GUIDES[name], jumps, output).choice(), guide.choice()
            assert (anew.forced, anew.is_done, anew.mask is None) == (
                choice.forced,
                choice.is_done,
                choice.mask is None,
            )
            assert anew.mask is None or ids_of(anew.mask) == allowed(guide)
            output.append(rng.choice(sorted(allowed(guide))))
            guide.append(output[-1])


@pytest.mark.parametrize("name", ["schema", "regex", "lark", "token"])
def test_jumps_change_no_answer(compiler: Compiler, code: Bytes, name: str) -> None:
    """Forced text that is sampled one by one, for its log-probabilities, has the same tokens."""
    for seed in range(20):
        rng, output = random.Random(seed), []
        jumping, stepping = (opened(compiler, GUIDES[name], jumps) for jumps in (True, False))
        while END not in output:
            forced = jumping.choice().forced
            tokens = forced or (rng.choice(sorted(allowed(jumping))),)
            for token in tokens:
                assert allowed(stepping) == ({token} if forced else allowed(jumping))
                jumping.append(token)
                stepping.append(token)
            output += tokens
        assert allowed(stepping) == {END}
        if name == "schema":
            assert json.loads(code.text(output[:-1]))["name"] in NAMES


def test_text_that_looks_like_a_special_token_is_text(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, Guide(Grammar("json_schema", json.dumps({"const": SPECIAL_TOKENS[2]}))), jumps=True)
    output = walk(guide, random.Random(0))
    assert output == [*code.ids(f'"{SPECIAL_TOKENS[2]}"'), END]
    assert END not in output[:-1]


def test_nothing_but_the_end_follows_a_complete_grammar(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, Guide(Grammar("regex", "ab?")), output=code.ids("a"))
    assert allowed(guide) == {END, *code.ids("b")}
    for (more,) in (code.ids("b"), [END], [END]):
        guide.append(more)
        assert allowed(guide) == {END}


def test_reasoning_is_free_but_for_the_end_of_the_sequence(compiler: Compiler, code: Bytes) -> None:
    guide = opened(compiler, GUIDES["after"])
    assert allowed(guide) == set(range(VOCAB_SIZE)) - {END}
    guide.append(65)
    guide.append(66)
    assert allowed(guide) == set(code.ids("0123456789"))


def test_an_output_may_open_with_reasoning_or_begin_at_once(compiler: Compiler, code: Bytes) -> None:
    digits = set(code.ids("0123456789a"))
    guide = opened(compiler, GUIDES["maybe after"])
    assert allowed(guide) == {65, *digits}
    guide.append(*code.ids("1"))
    assert allowed(guide) == digits
    guide = opened(compiler, GUIDES["maybe after"], output=[65])
    assert allowed(guide) == {65} | (digits if 65 in digits else set())
    for token in (65, 5, 66):
        guide.append(token)
    assert allowed(guide) == digits


def test_a_call_ends_the_reasoning_and_begins_the_content(compiler: Compiler, code: Bytes) -> None:
    marks = reasoning("", "bc", "<c>")
    guide = opened(compiler, Guide(Grammar("lark", 'start: "<c>" "fg"? "x"'), marks), output=code.ids("zz<c>"))
    assert allowed(guide) == set(code.ids("fx"))
    with pytest.raises(RequestError):
        opened(compiler, Guide(Grammar("lark", 'start: "(c)"'), marks), output=code.ids("zz<c>"))


def test_content_begins_with_a_token(compiler: Compiler, code: Bytes) -> None:
    grammar, texts = GUIDES["after"].grammar, TokenTexts([*compiler.tokens[:-1], b"c\n"])
    assert grammar is not None
    bits = np.zeros(compiler.num_words, np.uint32)
    guide = RowGuide(GUIDES["after"], (END,), compiler.compile(grammar), bits, False, texts)
    guide.open()
    guide.append(code.ids("b")[0])
    assert allowed(guide) == set(range(VOCAB_SIZE - 1)) - {END}


def test_a_guide_without_a_grammar_ends(compiler: Compiler) -> None:
    guide = opened(compiler, GUIDES["budget"], jumps=True, output=[5, 5, 65])
    assert guide.choice() == NextTokens((66,))
    guide.append(66)
    assert guide.choice() == NextTokens(is_done=True)


def test_a_token_that_does_not_match_is_a_fault(compiler: Compiler, code: Bytes) -> None:
    with pytest.raises(GrammarError, match="cannot be followed"):
        opened(compiler, GUIDES["regex"], output=code.ids("z"))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a?){500}a{500}"),
        Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
        Grammar("lark", 'start: a{1000000}\na: "x"'),
    ],
)
def test_a_grammar_beyond_the_limits_is_refused(compiler: Compiler, grammar: Grammar) -> None:
    """It compiles; but a token that it allows is one too many. An end of the output is no way out."""
    rng = random.Random(0)
    with pytest.raises(GrammarError):
        guide = opened(compiler, Guide(grammar))
        for _ in range(30):
            guide.append(rng.choice(sorted(allowed(guide) - {END})))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: s\ns: s s | w\nw: /[a-z]/"),
        Grammar("lark", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'),
        Grammar(
            "json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(600)}})
        ),
    ],
)
def test_an_honest_grammar_has_room(compiler: Compiler, grammar: Grammar) -> None:
    guide, rng = opened(compiler, Guide(grammar)), random.Random(0)
    for _ in range(30):
        guide.append(rng.choice(sorted(allowed(guide) - {END})))


def test_near_the_limits_a_row_that_starts_anew_goes_on_as_before() -> None:
    """What a matcher may cost depends on the grammar and the tokens alone, not on how often the row started anew."""
    compiler, rng, output = Compiler.of(str(BUNDLED), 640, [0]), random.Random(1), list[int]()
    guide = Guide(Grammar("regex", "((.*[aeiou].{100}){3}|(.*[a-m].{150}){4}|.*[n-z].{400})"))

    def step(row: RowGuide, token: int) -> bytes | None:
        """Append a token; the mask behind it, None if the row cannot go on."""
        try:
            row.append(token)
        except GrammarError:
            return None
        mask = row.choice().mask
        assert mask is not None
        return mask.tobytes()

    row = opened(compiler, guide)
    masks: list[bytes | None] = []
    while not masks or masks[-1] is not None:
        mask = row.choice().mask
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        output.append(rng.choice(allowed[1:]))
        masks.append(step(row, output[-1]))
    assert 20 < len(output) < 200
    for length in range(5, len(output), 10):
        anew = opened(compiler, guide, output=output[:length])
        assert [step(anew, token) for token in output[length:]] == masks[length:]


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
