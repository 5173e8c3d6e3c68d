"""The configuration of a checkpoint folder as one object, made of all files that hold a part of it. Torch-free."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import FLOATS, UNFINISHED_FILE, StoredTensor
from pypto_serving.model.contents import read_headers
from pypto_serving.model.fields import read_json_file
from pypto_serving.model.folder import what_it_is
from pypto_serving.model.formats.quantization import SECTION
from pypto_serving.model.formats.section import read_section_file, section_file
from pypto_serving.model.inventory import STORED_DTYPES
from pypto_serving.model.stored_names import HEAD, TABLE

CONFIG_FILE = "config.json"
_TIED = "tie_word_embeddings"
_OF_TEXT = "text_config"
_ROPE, _THETA = ("rope_scaling", "rope_parameters"), "rope_theta"
_SAMPLE = 1 << 16
"""Bytes that tell whether two matrices are the same."""
_RENAMED = {"compression_config": SECTION, "torch_dtype": "dtype"}
"""Older names of keys."""
_NAMES = {stored: name for name, stored in STORED_DTYPES.items()}


def read_raw_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object in the config.json of `folder`, with `overrides`. Raises ModelError if there is none.

    The decoder's part, `text_config`, joins the rest. A section of quantization may stand in a file of its own. Whether
    the embedding is the output layer is decided by the tensors, as in transformers, unless config.json denies it.
    """
    path = folder / CONFIG_FILE
    with suppress(OSError):  # the folder is inaccessible, which reading config.json reports
        if not path.exists():
            _refuse(folder)
    raw = flattened(read_json_file(path))
    beside = section_file(folder) if raw.get(SECTION) is None else None
    if beside is not None:
        raw[SECTION] = read_section_file(beside)
    raw = overridden(raw, flattened(overrides))
    if raw.get(_TIED) is not False:
        tied = _is_tied(read_headers(folder)[0])
        raw |= {} if tied is None or (tied and raw.get(_TIED)) else {_TIED: tied}
    return raw


def _refuse(folder: Path) -> None:
    """Raise ModelError if `folder` holds something else than a checkpoint in the form that is served."""
    if (folder / UNFINISHED_FILE).exists():
        raise ModelError(f"{folder} is an unfinished conversion; run the same `pypto-serving convert` again")
    if hint := what_it_is(folder):
        raise ModelError(f"{folder} is not a checkpoint: it has no {CONFIG_FILE}; {hint}")


def flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of config.json with the keys of its `text_config` beside the others, under today's names."""
    inner = raw.get(_OF_TEXT)
    values = {key: value for key, value in raw.items() if key != _OF_TEXT or not isinstance(inner, Mapping)}
    if isinstance(inner, Mapping):
        of_text = {key: value for key, value in inner.items() if value is not None or key not in raw}
        outer = {key: raw[key] for key in ("architectures", _TIED) if raw.get(key) is not None}
        values |= of_text | outer
    for old, new in _RENAMED.items():
        if values.get(new) is None and values.get(old) is not None:
            values[new] = values.pop(old)
    return values


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` with the values of `overrides`: objects are joined, and null means what it means there.

    What is said about RoPE goes to the section that config.json has, whatever its name.
    """
    section = next((key for key in _ROPE if isinstance(raw.get(key), Mapping) and raw[key]), None)
    if section is None:
        return _joined(raw, overrides)
    given = dict(overrides)
    for other in _ROPE:
        if other != section and other in given:
            given[section] = given.pop(other)
    wanted = given.get(section, {})
    if given.get(_THETA) is not None and _THETA in raw[section] and isinstance(wanted, Mapping):
        given[section] = {_THETA: given[_THETA], **wanted}
    return _joined(raw, given)


def _joined(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Join objects, at all depths. null stays: some families have defaults for absent keys."""
    joined = dict(values)
    for key, value in overrides.items():
        inner = values.get(key)
        if isinstance(value, Mapping):
            value = _joined(inner if isinstance(inner, Mapping) else {}, value)
        joined[key] = value
    return joined


def _is_tied(headers: Mapping[str, StoredTensor]) -> bool | None:
    """Return whether one matrix is embedding and output layer; None if the tensors do not tell."""
    head, table = headers.get(HEAD), headers.get(TABLE)
    if table is None or head is None:
        return None if table is None or any(name.startswith("lm_head.") for name in headers) else True
    if (head.dtype, head.shape) != (table.dtype, table.shape):
        return False
    return _sample(head) == _sample(table)


def _sample(tensor: StoredTensor) -> bytes:
    """Return bytes of the first and of middle rows of a matrix; b"" if they cannot be read."""
    try:
        with tensor.file.open("rb") as file:
            middle = (tensor.begin + tensor.end) // 2
            return b"".join(os.pread(file.fileno(), min(_SAMPLE, tensor.end - at), at) for at in (tensor.begin, middle))
    except OSError:
        return b""


def dtype_of(tensors: Iterable[StoredTensor]) -> str | None:
    """Return the dtype of most weights in floats, as config.json names it; None if there are none."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            counts[tensor.dtype] += tensor.num_bytes
    return _NAMES[counts.most_common(1)[0][0]] if counts else None
