"""The tokenizer of a GGUF file, as the files of a checkpoint. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pypto_serving.errors import ModelError
from pypto_serving.model.convert.files import as_json
from pypto_serving.model.fields import Fields
from pypto_serving.util import brief

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens."""
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)
"""Tokens that end a turn, which files often do not name as such."""
_SPACE = "▁"
"""A space, in SentencePiece's tokens."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _REST
_CODER = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "trillion"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe"), (_WORDS % "{1,3}",)),
    **dict.fromkeys(_QWEN2, (_WORDS % "",)),
    "tekken": (_CASED % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4"), (_CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}"),)),
    "seed-coder": (_CODER,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
"""What splits a text before BPE, by `tokenizer.ggml.pre`, one pattern after the other: no token spans two pieces."""
_IGNORE_MERGES = _BEGIN_WITH_BOS = (*_LLAMA3, "tekken")
"""Those that take a token as it is, whatever the merges; texts begin with BOS unless the file says otherwise."""
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not swallow the white space behind them."""
_MAX_TOKEN = 4096
"""Limit of characters of a token."""


def write_tokenizer(metadata: Mapping[str, Any], source: Path, target: Path) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json to `target`; return `bos_token_id` and `eos_token_id`.

    Raises ModelError naming a kind of tokenizer that is not known.
    """
    reader = _TokenizerReader(metadata, source)
    reader.tokenizer().save(str(target / "tokenizer.json"), pretty=False)
    (target / "tokenizer_config.json").write_bytes(as_json(reader.config()))
    return reader.ids()


class _TokenizerReader:
    """Reads the keys `tokenizer.*`."""

    def __init__(self, metadata: Mapping[str, Any], source: Path) -> None:
        own = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
        self._keys = Fields(own, str(source))
        self._tokens = self._strings("ggml.tokens")
        self._require(bool(self._tokens), "ggml.tokens", "a list of tokens")
        longest = max(map(len, self._tokens))
        self._require(longest <= _MAX_TOKEN, "ggml.tokens", f"tokens of at most {_MAX_TOKEN} characters")
        self._types = self._keys.int_list("ggml.token_type") or (1,) * len(self._tokens)
        self._require(len(self._types) == len(self._tokens), "ggml.token_type", "as long as the list of tokens")
        self._kind = self._keys.get("ggml.model")
        self._architecture = metadata.get("general.architecture")

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer."""
        if self._kind == "gpt2":
            tokenizer = self._byte_level()
        elif self._kind == "llama":
            tokenizer = self._sentence_piece()
        else:
            raise ModelError(
                f"{self._keys.source} has a tokenizer of the kind {brief(self._kind)}; gpt2 and llama can be read"
            )
        strips = self._kind == "llama" and self._architecture == "phi3"
        added = [
            AddedToken(
                token, special=type != _USER_DEFINED, normalized=False, rstrip=strips and token not in _KEEP_SPACE
            )
            for token, type in zip(self._tokens, self._types, strict=True)
            if type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        bos = self._special("bos")
        begins = self._kind == "llama" or self._keys.get("ggml.pre") in _BEGIN_WITH_BOS
        if bos is not None and self._keys.flag("ggml.add_bos_token", begins):
            token = {"id": "bos", "ids": [bos], "tokens": [self._tokens[bos]]}
            begin = processors.TemplateProcessing("bos $A", "bos $A bos $B", [token])
            before = [] if tokenizer.post_processor is None else [tokenizer.post_processor]
            tokenizer.post_processor = processors.Sequence([*before, begin])
        return tokenizer

    def config(self) -> dict[str, Any]:
        """Return the object of tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (token := self._special(key)) is not None:
                config[f"{name}_token"] = self._tokens[token]
        named = [
            {"name": key.removeprefix("chat_template."), "template": value}
            for key, value in self._keys.values.items()
            if key.startswith("chat_template.")
        ]
        template = self._keys.get("chat_template")
        for each in [template, *(entry["template"] for entry in named)]:
            self._require(each is None or isinstance(each, str), "chat_template", "a text")
        if named:
            config["chat_template"] = [{"name": "default", "template": template}] * bool(template) + named
        elif template:
            config["chat_template"] = template
        return config

    def ids(self) -> dict[str, Any]:
        """Return the ids of the token that begins a text, and of those that end one."""
        named = [self._special(key) for key in ("eos", "eot", "eom")]
        whole = {token: id for id, token in enumerate(self._tokens) if self._types[id] in (_CONTROL, _USER_DEFINED)}
        known = [whole.get(token) for token in _ENDS]
        ends = sorted({id for id in named + known if id is not None})
        return {"bos_token_id": self._special("bos"), "eos_token_id": ends}

    def _byte_level(self) -> Tokenizer:
        """BPE over bytes, as in GPT-2: Sennrich et al. 2016, arXiv:1508.07909."""
        pre = str(self._keys.get("ggml.pre") or "default")
        if pre not in _SPLITS:
            known = f"which is not known here; known are {', '.join(_SPLITS)}"
            raise ModelError(f"{self._keys.source} splits texts as {brief(pre)}, {known}")
        merges = [merge.partition(" ")[::2] for merge in self._strings("ggml.merges")]
        plain = (token for token, type in zip(self._tokens, self._types, strict=True) if type == _NORMAL)
        self._require(bool(merges) or all(len(token) < 2 for token in plain), "ggml.merges", "a list of joins")
        vocabulary = {token: id for id, token in enumerate(self._tokens)}
        for first, second in merges:
            if not {first, second, first + second} <= vocabulary.keys():
                pair = f"{brief(first)} and {brief(second)}"
                raise ModelError(f"{self._keys.source}: tokenizer.ggml.merges has {pair}, which join to no token")
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _IGNORE_MERGES))
        split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, rest])
        if pre in _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer

    def _sentence_piece(self) -> Tokenizer:
        """BPE of SentencePiece, which joins pairs with the best score first: arXiv:1808.06226."""
        scores = self._keys.get("ggml.scores")
        numbers = isinstance(scores, list) and all(isinstance(score, float) for score in scores)
        self._require(numbers and len(scores) == len(self._tokens), "ggml.scores", "a number for each token")
        vocabulary = {token: id for id, token in enumerate(self._tokens)}
        unknown = self._types.index(_UNKNOWN) if _UNKNOWN in self._types else self._special("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocabulary,
                _merges(self._tokens, vocabulary, scores),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self._keys.flag("ggml.add_space_prefix", True)
        prepend = [normalizers.Prepend(_SPACE)] * prefix
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] * prefix
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer

    def _special(self, name: str) -> int | None:
        """Return an id of a token by its key, if it is in the vocabulary."""
        id = self._keys.get(f"ggml.{name}_token_id")
        return id if isinstance(id, int) and 0 <= id < len(self._tokens) else None

    def _strings(self, key: str) -> list[str]:
        values = self._keys.get(key) or []
        self._require(
            isinstance(values, list) and all(isinstance(each, str) for each in values), key, "a list of texts"
        )
        return list(values)

    def _require(self, holds: bool, key: str, allowed: str) -> None:
        self._keys.require(holds, f"tokenizer.{key}", "something else", allowed)


def _merges(tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return pairs of tokens that join to a token, in the order in which SentencePiece joins them."""
    best_first = np.argsort(-np.array(scores), kind="stable").tolist()
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, best_first)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
