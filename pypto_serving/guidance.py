"""Compile grammars and follow outputs, with llguidance. Like tokenizers, it is imported on first use.

llguidance is deterministic: the allowed tokens depend only on the grammar and the tokens so far. `LIMITS` bounds its
work in steps, not in time, so a grammar is refused on every machine or on none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar

if TYPE_CHECKING:
    import llguidance
    import tokenizers

T = TypeVar("T")

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Limits of each call. The fuel also bounds the expansion of counted repetitions: the first mask of
`(((a{100}){100}){100})` takes 30 ms and 11 MB. A row needs a few items per optional property of an object.

None of these limits bounds time: ambiguous rules may take seconds before they reach one. So grammars are compiled and
followed in processes with limits of time and memory: `api/reading` and `worker/guiding`.
"""
MAX_KNOWN_CHARS = 1 << 24
"""Limit of the characters of remembered grammars, plus ENTRY_CHARS for each."""
ENTRY_CHARS = 1 << 12
MAX_MESSAGE_CHARS = 300
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class GrammarError(RequestError):
    """A grammar cannot be compiled, or cannot be followed within the limits."""

    code = "invalid_grammar"


def content_key(grammar: Grammar) -> int:
    """Return a positive hash of the content of a grammar, the same in every process."""
    digest = hashlib.blake2b(f"{grammar.syntax}\n{grammar.text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


class KnownGrammars(Generic[T]):
    """Remembers the outcomes of grammars, by `content_key`; forgets the least recently used."""

    def __init__(self) -> None:
        self._found: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: int) -> T | None:
        """Return the outcome of a grammar, or None if it is unknown."""
        if key not in self._found:
            return None
        self._found.move_to_end(key)
        return self._found[key][0]

    def add(self, key: int, outcome: T, num_chars: int = 0) -> None:
        """Remember the outcome of a grammar, which keeps `num_chars` of text in memory."""
        num_chars += ENTRY_CHARS
        self._num_chars += num_chars - self._found.pop(key, (None, 0))[1]
        self._found[key] = outcome, num_chars
        while self._num_chars > MAX_KNOWN_CHARS:
            self._num_chars -= self._found.popitem(last=False)[1][1]


class Matcher:
    """Follows one output token by token.

    Copies share the cache of their lexer, and therefore also the limits.
    """

    def __init__(self, raw: llguidance.LLMatcher) -> None:
        self._raw = raw

    def copy(self) -> Matcher:
        """Return a matcher with the same state."""
        return Matcher(self._raw.deep_copy())

    def consume(self, token_id: int) -> None:
        """Append a token. Raises GrammarError if it does not match."""
        if not self._raw.consume_token(token_id):
            self._fail()

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-sequence token can follow."""
        return self._raw.is_stopped()

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the tokenizer encodes their text; [] if there is a choice.

        Raises GrammarError beyond the limits.
        """
        token_ids = self._raw.compute_ff_tokens()
        if self._raw.is_error():  # an error also counts as stopped
            self._fail()
        return token_ids

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Write the mask of allowed tokens: bit v % 32 of word v // 32. Slow.

        Raises GrammarError beyond the limits.
        """
        self._raw.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._raw.is_error():
            self._fail()

    def _fail(self) -> None:
        raise GrammarError(f"the grammar cannot be followed: {_brief(self._raw.get_error())}")


class VocabularyBytes:
    """The UTF-8 bytes of tokens. Immutable, so any thread may use it."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        decoder = raw.decoder.__getstate__() if raw.decoder is not None else b""
        self._bytes_of = _byte_alphabet() if b'"ByteLevel"' in decoder else None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character; b"" for unknown ids."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char) or char.encode() for char in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Map the characters of byte-level BPE to bytes (GPT-2).

    Bytes printable in Latin-1 map to that character; the others to U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)})
    return alphabet


class Vocabulary:
    """The tokens of a checkpoint, in the form for llguidance. Special tokens have no text that could match."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model_dir: str, vocab_size: int, eos_token_id: int) -> None:
        from tokenizers import Tokenizer

        self._raw = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        self._raw.encode_special_tokens = True
        vocabulary = VocabularyBytes(self._raw)
        size = max(vocab_size, self._raw.get_vocab_size())
        self.tokens = [vocabulary.bytes_of(i) for i in range(size)]
        self.special_token_ids = [i for i, token in self._raw.get_added_tokens_decoder().items() if token.special]
        self.eos_token_id = eos_token_id
        self.greedy: llguidance.LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Encode forced text; if the tokenizer would change it, use the longest matching tokens instead."""
        ids: list[int] = self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self.greedy is not None and b"".join([self.tokens[i] for i in ids]) != text.encode():
            return self.greedy.greedy_tokenize(text)
        return ids


class Compiler:
    """Compiles grammars for one tokenizer. `tokens`: the bytes of each of its tokens."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, tokens: Sequence[bytes]) -> None:
        from llguidance import LLParserLimits

        self.tokens = tokens
        self._tokenizer = tokenizer
        self._limits = LLParserLimits(**LIMITS, verbose_errors=False)

    @classmethod
    def of(cls, model_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Compiler:
        """Prepare the tokenizer of a checkpoint: a second of CPU time and 150 MB for 150,000 tokens."""
        from llguidance import LLTokenizer

        vocabulary = Vocabulary(model_dir, vocab_size, eos_token_ids[0])
        vocabulary.greedy = LLTokenizer(vocabulary, eos_token=list(eos_token_ids))  # type: ignore[arg-type]
        return cls(vocabulary.greedy, vocabulary.tokens)

    @classmethod
    def of_bytes(cls) -> Compiler:
        """Prepare a tokenizer with one token per byte, at almost no cost."""
        from llguidance import LLTokenizer

        return cls(LLTokenizer("byte"), [bytes([byte]) for byte in range(256)])

    @property
    def num_words(self) -> int:
        """Number of words of a mask."""
        return -(-self._tokenizer.vocab_size // 32)

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of an output. Slow.

        Raises GrammarError.
        """
        from llguidance import LLMatcher

        raw = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
        if raw.is_error():
            raise GrammarError(_brief(raw.get_error()))
        return Matcher(raw)


def checked(grammar: Grammar) -> Grammar:
    """Check that a grammar compiles, without a tokenizer; return it, with GBNF as Lark. Slow. Raises GrammarError."""
    if grammar.syntax == "gbnf":
        grammar = Grammar("lark", _to_lark(grammar.text))
    compiler = Compiler.of_bytes()
    try:
        compiler.compile(grammar).fill(np.zeros(compiler.num_words, np.uint32))
    except GrammarError as error:
        if grammar.syntax != "lark" or "token" not in str(error).lower():
            raise
        _check_rules(grammar)  # only the tokenizer knows whether special tokens of the grammar exist
    return grammar


def _check_rules(grammar: Grammar) -> None:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(_source(grammar))
    if is_error:
        raise GrammarError(_brief(messages[0]))


def _to_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError("the GBNF grammar nests too deeply") from None
    except Exception as error:  # its own error class, and any error of its parser
        raise GrammarError(f"the GBNF grammar cannot be read: {_brief(str(error))}") from None


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form."""
    from llguidance import LLMatcher

    if grammar.syntax == "lark":
        return json.dumps({"grammars": [{"lark_grammar": grammar.text}]})
    if grammar.syntax == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_json_schema(grammar.text)


def _brief(message: str) -> str:
    """Return an error of llguidance in one line: its first line, and the reason of a regex parser below."""
    if message.startswith("NoExtension"):
        return "nothing can match it"
    lines = message.splitlines() or [""]
    return " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error:"))])[:MAX_MESSAGE_CHARS]
