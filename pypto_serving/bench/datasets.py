"""Make the prompts of a run: random token ids, random suffixes after shared prefixes, or rows of a JSONL file.

A synthetic prompt depends on (seed, index) only, so the first n prompts are the same however many follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pypto_serving.bench.options import read_rows, require_int
from pypto_serving.errors import ConfigError

_PROMPT_STREAM, _PREFIX_STREAM = 0, 1


@dataclass(frozen=True)
class Prompt:
    """The prompt of one request. Lengths are in tokens; `input_len` is None if only the server can count it.

    `content` is text, token ids, or chat messages.
    """

    content: str | list[int] | list[dict[str, Any]]
    input_len: int | None
    output_len: int


@dataclass(frozen=True)
class PromptVocabulary:
    """The token ids for random prompts, and the tokenizer that decodes them, if any."""

    ids: npt.NDArray[np.int64]
    tokenizer: Tokenizer | None = None

    @classmethod
    def of_size(cls, vocab_size: int) -> PromptVocabulary:
        require_int("--vocab-size", vocab_size, 1)
        return cls(np.arange(vocab_size))

    @classmethod
    def of_tokenizer(cls, path: Path) -> PromptVocabulary:
        """Read all ids except the special ones from `path` (tokenizer.json or its folder)."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"--tokenizer {path}: {file} does not exist; name a folder that holds a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"--tokenizer {path}: cannot read {file}: {error}") from None
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = sorted(set(tokenizer.get_vocab().values()) - special)
        return cls(np.array(ids, dtype=np.int64), tokenizer)

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        drawn: list[int] = self.ids[rng.integers(len(self.ids), size=length)].tolist()
        return drawn


class Dataset(Protocol):
    """A source of prompts. A `synthetic` one needs a vocabulary, and its outputs have no natural end."""

    @property
    def synthetic(self) -> bool: ...

    def prompts(self, count: int, seed: int, vocabulary: PromptVocabulary | None) -> list[Prompt]: ...


@dataclass(frozen=True, kw_only=True)
class RandomData:
    """Random prompts after one common prefix, uniform in [floor(len * (1 - ratio)), ceil(len * (1 + ratio))]."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    synthetic = True

    def __post_init__(self) -> None:
        require_int("--random-input-len", self.input_len, 1)
        require_int("--random-output-len", self.output_len, 1)
        require_int("--random-prefix-len", self.prefix_len, 0)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}")

    def prompts(self, count: int, seed: int, vocabulary: PromptVocabulary | None) -> list[Prompt]:
        assert vocabulary is not None
        prefix = vocabulary.draw(_rng(seed, _PREFIX_STREAM, 0), self.prefix_len)
        return [self._prompt(prefix, _rng(seed, _PROMPT_STREAM, i), vocabulary) for i in range(count)]

    def _prompt(self, prefix: list[int], rng: np.random.Generator, vocabulary: PromptVocabulary) -> Prompt:
        input_len, output_len = self._length(rng, self.input_len), self._length(rng, self.output_len)
        return Prompt(prefix + vocabulary.draw(rng, input_len), len(prefix) + input_len, output_len)

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        low = max(1, math.floor(mean * (1 - self.range_ratio)))
        high = math.ceil(mean * (1 + self.range_ratio))
        return int(rng.integers(low, high, endpoint=True))


@dataclass(frozen=True, kw_only=True)
class PrefixRepetitionData:
    """Random suffixes after shared prefixes: prompt i has prefix i mod `num_prefixes` and a suffix of its own."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    synthetic = True

    def __post_init__(self) -> None:
        require_int("--prefix-repetition-prefix-len", self.prefix_len, 1)
        require_int("--prefix-repetition-suffix-len", self.suffix_len, 0)
        require_int("--prefix-repetition-num-prefixes", self.num_prefixes, 1)
        require_int("--prefix-repetition-output-len", self.output_len, 1)

    def prompts(self, count: int, seed: int, vocabulary: PromptVocabulary | None) -> list[Prompt]:
        assert vocabulary is not None
        if count < self.num_prefixes:
            raise ConfigError(
                f"--num-prompts {count} is below --prefix-repetition-num-prefixes {self.num_prefixes}, "
                "so no prefix would repeat; raise the first or lower the second"
            )
        prefixes = [vocabulary.draw(_rng(seed, _PREFIX_STREAM, i), self.prefix_len) for i in range(self.num_prefixes)]
        contents = [
            prefixes[i % self.num_prefixes] + vocabulary.draw(_rng(seed, _PROMPT_STREAM, i), self.suffix_len)
            for i in range(count)
        ]
        return [Prompt(content, len(content), self.output_len) for content in contents]


class _DatasetRow(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class FileData:
    """Rows of a JSONL file in seeded random order, repeated if there are fewer rows than requests.

    A row has one of `prompt`, `messages`, `prompt_token_ids`, and may set `output_tokens` or `max_tokens`.
    """

    path: Path
    output_len: int = 256
    synthetic = False

    def __post_init__(self) -> None:
        require_int("--custom-output-len", self.output_len, 1)

    def prompts(self, count: int, seed: int, vocabulary: PromptVocabulary | None) -> list[Prompt]:
        rows = self.rows()
        order = np.random.default_rng(seed).permutation(len(rows))
        return [rows[order[i % len(rows)]] for i in range(count)]

    def rows(self) -> list[Prompt]:
        """Return all rows in file order. Raises ConfigError that names the first bad line."""
        rows = [self._prompt(where, row) for where, row in read_rows("--dataset-path", self.path, _DatasetRow)]
        if not rows:
            raise ConfigError(f"--dataset-path {self.path} is empty; it needs at least one row with a prompt")
        return rows

    def _prompt(self, where: str, row: _DatasetRow) -> Prompt:
        contents = [c for c in (row.prompt, row.messages, row.prompt_token_ids) if c]
        if len(contents) != 1:
            raise ConfigError(f"{where}: needs exactly one non-empty prompt, messages or prompt_token_ids")
        output_len = next((n for n in (row.output_tokens, row.max_tokens) if n is not None), self.output_len)
        require_int(f"{where}: output_tokens", output_len, 1)
        input_len = len(row.prompt_token_ids) if row.prompt_token_ids else None
        return Prompt(contents[0], input_len, output_len)


def as_messages(prompt: Prompt, tokenizer: Tokenizer | None) -> Prompt:
    """Convert `prompt` for a chat endpoint: decode token ids, and wrap text in one user message."""
    content = prompt.content
    if _is_token_ids(content):
        if tokenizer is None:
            raise ConfigError("--backend openai-chat sends text, and this data set is token ids: give --tokenizer DIR")
        content, input_len = tokenizer.decode(content), None
        prompt = replace(prompt, content=content, input_len=input_len)
    if isinstance(content, str):
        return replace(prompt, content=[{"role": "user", "content": content}])
    return prompt


def as_completion(prompt: Prompt) -> Prompt:
    """Return `prompt` for a completions endpoint. Raises ConfigError for chat messages."""
    if isinstance(prompt.content, str) or _is_token_ids(prompt.content):
        return prompt
    raise ConfigError("the data set holds chat messages; send them with --backend openai-chat")


def _is_token_ids(content: object) -> TypeGuard[list[int]]:
    return isinstance(content, list) and isinstance(content[0], int)


def _rng(seed: int, stream: int, index: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream, index])
