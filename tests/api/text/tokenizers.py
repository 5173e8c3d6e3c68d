"""Tokenizers that tests share."""

from __future__ import annotations

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.checkpoint import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer(), {"eos_token": "<|end|>"})
NUM_IDS = TOKENIZER.raw.get_vocab_size()


def metaspace() -> Tokenizer:
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "<0xE4>": 3, "<0xB8>": 4, "<0xAD>": 5, "!": 6}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return Tokenizer(raw)
