"""Read a checkpoint's small JSON files: special tokens and end-of-sequence ids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pypto_serving.model.fields import Fields, read_json_file

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return {} if the file does not exist. Raises ModelError if it is damaged, or a dead link."""
    return read_json_file(path) if os.path.lexists(path) else {}


def has_tokenizer(model_dir: str | Path) -> bool:
    """Return whether a checkpoint has a tokenizer.json, readable or not. A model without files, "", has none."""
    return bool(str(model_dir)) and os.path.lexists(Path(model_dir) / "tokenizer.json")


def load_special_tokens(model_dir: str | Path) -> dict[str, str]:
    """Read the named special tokens of a checkpoint, such as {"bos_token": "<s>"}. Raises ModelError."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        declared = read_optional_json(Path(model_dir) / file)
        for name in _SPECIAL_NAMES:
            value = declared.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def read_generation_config(model_dir: str | Path) -> Fields:
    """Read a checkpoint's generation_config.json, empty if it has none; a model without files is "".

    Raises ModelError if it is damaged.
    """
    path = Path(model_dir) / "generation_config.json"
    return Fields(read_optional_json(path) if str(model_dir) else {}, str(path))


def eos_token_ids(generation: Fields, config_ids: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, ascending; `config_ids` of config.json if it has none.

    Raises ModelError if an id is not a whole number.
    """
    has_own = generation.get("eos_token_id") is not None
    return tuple(sorted(set(generation.int_list("eos_token_id") if has_own else config_ids)))
