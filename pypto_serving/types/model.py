"""What is known about a checkpoint before anything is loaded."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

import msgspec

from pypto_serving.types.kv import KVCacheGroupSpec


class StoredTensors(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one dtype in a checkpoint's files."""

    dtype: str
    count: int
    num_bytes: int


Source = Literal["files", "index", "config.json"]


class IndexFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's index says; `files_here` of its files are in the folder, `total_size` is in bytes."""

    num_tensors: int
    num_files: int
    files_here: int
    total_size: int | None


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds, as `source` lists it.

    `tensors` counts all tensors, `draft_tensors` and `draft_bytes` those of draft layers among them, which nothing
    reads. Parameters are elements of float tensors before quantisation. `verdicts` says in lines how sources differ.
    """

    source: Source
    tensors: tuple[StoredTensors, ...]
    draft_tensors: int
    draft_bytes: int
    num_parameters: int
    num_parameters_with_drafts: int
    index: IndexFacts | None
    verdicts: tuple[str, ...]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as its files describe it. `dtype` is the serving dtype of weights, activations and KV.

    `max_position_embeddings` is the longest sequence in tokens, rope scaling included. `weight_bytes` counts the
    weights as torch holds them, `packed_bytes` as the CPU kernels do; `position_bytes` are for each position of the
    longest sequence, such as tables of angles. `needs_torch` says why the kernels cannot serve
    the model; it is empty if they can. `quantization` names how weights are quantised, which only the kernels serve.
    `own_blocks`: the KV groups have block sizes of their own, so that no other can be chosen.
    `obstacle` says why nothing serves the model, and is empty if something does.
    """

    path: str
    architecture: str
    dtype: str
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int
    weight_bytes: int
    packed_bytes: int = 0
    position_bytes: int = 0
    needs_torch: str = "it has no program for the CPU kernels"
    quantization: str = ""
    obstacle: str = ""
    own_blocks: bool = False
    kv_groups: tuple[KVCacheGroupSpec, ...]


def default_model_name(path: str) -> str:
    """The name to serve a checkpoint under: its folder's name, or `owner/name` inside a hub cache."""
    for part in PurePath(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return PurePath(path).name or path
