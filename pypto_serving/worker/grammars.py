"""Grammars: the compiled grammars of a worker, each once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from pypto_serving.guidance import Compiler, Matcher
from pypto_serving.types.guide import Grammar
from pypto_serving.worker.reasoning import TokenTexts

MAX_GRAMMARS, MAX_CHARS = 32, 4 << 20
"""Most compiled grammars that are kept, and most characters of all of them. The last one is kept whatever its size."""


class Grammars:
    """Owns compiled grammars, the least recently used first. Any thread may use it; the tokenizer is prepared once."""

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._compilers: dict[Sequence[int], Compiler] = {}
        self._texts: TokenTexts | None = None
        self._kept: OrderedDict[tuple[Grammar, Sequence[int]], Matcher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_words(self) -> int:
        """Words of a mask: one for each 32 tokens of the model or of its tokenizer, whichever has more."""
        return max([-(-self._vocab_size // 32), *(compiler.num_words for compiler in self._compilers.values())])

    @property
    def is_prepared(self) -> bool:
        """Whether the tokenizer is."""
        return self._texts is not None

    def texts(self, eos_ids: Sequence[int]) -> TokenTexts:
        """Return the texts of all tokens. Takes time, once."""
        if self._texts is None:
            self._compiler(eos_ids)
        assert self._texts is not None
        return self._texts

    def find(self, grammar: Grammar, eos_ids: Sequence[int]) -> Matcher | None:
        """Return the matcher of a compiled grammar, to be copied; None if it must be compiled first."""
        with self._lock:
            found = self._kept.get((grammar, eos_ids))
            if found is not None:
                self._kept.move_to_end((grammar, eos_ids))
            return found

    def compile(self, grammar: Grammar, eos_ids: Sequence[int]) -> Matcher:
        """Compile a grammar for outputs that end with one of `eos_ids`. Takes time. Raises GrammarError."""
        if (found := self.find(grammar, eos_ids)) is not None:
            return found
        made = self._compiler(eos_ids).compile(grammar)
        with self._lock:
            self._kept[grammar, eos_ids] = made
            while len(self._kept) > 1 and (len(self._kept) > MAX_GRAMMARS or self._num_chars() > MAX_CHARS):
                self._kept.popitem(last=False)
        return made

    def renew(self, grammar: Grammar, eos_ids: Sequence[int]) -> Matcher:
        """Drop a compiled grammar with all that its lexer learned, and compile it for one output alone."""
        with self._lock:
            self._kept.pop((grammar, eos_ids), None)
        return self._compiler(eos_ids).compile(grammar)

    def _num_chars(self) -> int:
        return sum(len(grammar.text) for grammar, _ in self._kept)

    def _compiler(self, eos_ids: Sequence[int]) -> Compiler:
        with self._preparing:
            if eos_ids not in self._compilers:
                self._compilers = {eos_ids: (made := Compiler.of(self._model_dir, self._vocab_size, eos_ids))}
                self._texts = self._texts or TokenTexts(made.tokens)
            return self._compilers[eos_ids]
