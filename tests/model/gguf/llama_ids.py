"""What llama.cpp makes of the texts of `texts.py`: small vocabularies for each way to split texts, and digests of ids.

`python -m tests.model.gguf.llama_ids FOLDER`, with node-llama-cpp in FOLDER/node_modules, writes llama_ids.json anew.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from pypto_serving.setup.locate import locate_model
from pypto_serving.util import hash128
from tests.model.gguf.texts import SPECIAL, texts

STORED = Path(__file__).with_suffix(".json")
SPLITS = (
    *("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"),
    *("deepseek-coder", "seed-coder"),
)
SENTENCE_PIECE = ("llama", "phi3", "no prefix")


def byte_letters(text: str) -> str:
    """The letters of byte-level BPE for the bytes of a text."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in encoder.pre_tokenize_str(text))


def common(pieces: Iterator[str], count: int) -> list[str]:
    """The most frequent ones, in an order that is the same everywhere."""
    return [piece for piece, _ in sorted(Counter(pieces).items(), key=lambda item: (-item[1], item[0]))[:count]]


@functools.cache
def pairs_and_words() -> tuple[list[str], list[str]]:
    """Frequent pairs of bytes across all borders, and words, in letters of byte-level BPE."""
    letters = [byte_letters(text) for text in texts()]
    pairs = common((text[at : at + 2] for text in letters for at in range(len(text) - 1)), 4000)
    return pairs, common((word for text in letters for word in re.findall(r"Ġ?[A-Za-z]{3,}", text)), 200)


def byte_level(pre: str) -> dict[str, Any]:
    """A vocabulary of bytes, of frequent pairs, and of words that no merge makes."""
    pairs, words = pairs_and_words()
    plain = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs, *words]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*plain, *SPECIAL],
        "token_type": [1] * len(plain) + [3] * len(SPECIAL),
        "merges": [f"{pair[0]} {pair[1]}" for pair in pairs],
        "bos_token_id": len(plain),
        "eos_token_id": len(plain) + 1,
        "add_bos_token": False,
    }


@functools.cache
def joins_and_letters() -> tuple[list[str], list[str]]:
    """Frequent strings of 2 to 5 characters, and most characters."""
    written = [text.replace(" ", "▁") for text in texts()]
    letters = common((letter for text in written for letter in text if letter != "\0"), 3000)
    known = set(letters)
    strings = (text[at : at + size] for text in written for size in (2, 3, 4, 5) for at in range(len(text) - size + 1))
    return common((each for each in strings if known.issuperset(each) and each not in SPECIAL), 4000), letters


def sentence_piece(kind: str) -> dict[str, Any]:
    """A vocabulary of special tokens, bytes, letters and joins of them."""
    joins, letters = joins_and_letters()
    special = ["<unk>", "<s>", "</s>", *(token for token in SPECIAL if token not in ("<unk>", "<s>", "</s>"))]
    tokens = [*special, *(f"<0x{value:02X}>" for value in range(256)), *joins, *letters]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2] + [3] * (len(special) - 1) + [6] * 256 + [1] * (len(joins) + len(letters)),
        "scores": [0.0] * (len(special) + 256) + [float(-at) for at in range(len(joins) + len(letters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
        "add_space_prefix": kind != "no prefix",
    }


def metadata(name: str) -> dict[str, Any]:
    """The keys of a file with this tokenizer."""
    keys = sentence_piece(name) if name in SENTENCE_PIECE else byte_level(name)
    architecture = "phi3" if name == "phi3" else "llama"
    general = {"general.architecture": architecture, "general.name": name.replace("phi3", "Phi-3")}
    return general | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def digests(ids: Sequence[Sequence[int]]) -> bytes:
    """Two bytes for each list of ids."""
    return b"".join(hash128(np.array(each, "<i4").tobytes())[:2] for each in ids)


def stored() -> dict[str, bytes]:
    """The digests of all texts by tokenizer; under `texts` those of the texts themselves."""
    return {name: base64.b64decode(value) for name, value in json.loads(STORED.read_bytes()).items()}


def differing(name: str, tokenizer: Tokenizer) -> list[str]:
    """The texts of which a tokenizer makes other ids than llama.cpp made."""
    found, wanted = digests([each.ids for each in tokenizer.encode_batch(texts())]), stored()[name]
    return [text for at, text in enumerate(texts()) if found[2 * at : 2 * at + 2] != wanted[2 * at : 2 * at + 2]]


def write_vocabulary(path: Path, name: str) -> None:
    """A file without tensors, as llama.cpp reads it for its vocabulary alone."""
    keys = metadata(name)
    architecture = keys.pop("general.architecture")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}
            writer.add_key_value(key, value, kinds[type(value)])
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(keys["tokenizer.ggml.tokens"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ask(folder: str, files: Sequence[Path]) -> list[list[list[int]]]:
    """The ids that llama.cpp makes of all texts with the tokenizer of each file."""
    command = ["node", str(Path(__file__).with_suffix(".mjs")), folder]
    requests = "".join(json.dumps({"file": str(file), "texts": texts()}) + "\n" for file in files)
    answers = subprocess.run(command, input=requests, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in answers.splitlines()]


def main() -> None:
    """Write the digests."""
    names = (*SPLITS, *SENTENCE_PIECE)
    with tempfile.TemporaryDirectory() as made:
        files = [Path(made) / f"{at}.gguf" for at in range(len(names))]
        for name, file in zip(names, files, strict=True):
            write_vocabulary(file, name)
        smollm2 = locate_model("smollm2").parents[2] / "models/smollm2.gguf"
        found = zip((*names, "smollm2"), ask(sys.argv[1], [*files, smollm2]), strict=True)
    values = {"texts": digests([list(text.encode()) for text in texts()])}
    values |= {name: digests(ids) for name, ids in found}
    lines = {name: base64.b64encode(value).decode() for name, value in values.items()}
    STORED.write_text(json.dumps(lines, indent=0) + "\n")


if __name__ == "__main__":
    main()
