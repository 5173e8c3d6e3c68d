"""Facts about a checkpoint, read from its files before anything is loaded."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Literal

import msgspec

from pypto_serving.parallel.topology import ModelParts
from pypto_serving.types.kv import KVCacheGroupSpec

SERVING_DTYPES = ("float32", "bfloat16")
"""Dtypes of weights, activations and KV in serving."""


class TensorTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one dtype in a checkpoint's files."""

    dtype: str
    count: int
    num_bytes: int


class StoredForm(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of linear layers stored in one form: `num_parameters` weights in `num_bytes`, including scales."""

    name: str
    matrices: int
    num_parameters: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_parameters


Source = Literal["files", "index", "config.json"]


class IndexFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from the index of a checkpoint. `files_here` of its files are in the folder; `total_size` is in bytes."""

    num_tensors: int
    num_files: int
    files_here: int
    total_size: int | None


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint, as `source` lists them.

    tensors: all tensors by dtype.
    forms: matrices of linear layers by stored form, without draft layers.
    draft_tensors, draft_bytes: tensors of draft layers among all tensors, which nothing reads.
    num_parameters: elements of float tensors before quantization.
    verdicts: differences between the sources, one line each.
    obstacle: why the files cannot be served, in one line; "" unless all files are here.
    """

    source: Source
    tensors: tuple[TensorTotals, ...]
    forms: tuple[StoredForm, ...]
    draft_tensors: int
    draft_bytes: int
    num_parameters: int
    num_parameters_with_drafts: int
    index: IndexFacts | None
    verdicts: tuple[str, ...]
    obstacle: str

    @property
    def bits_per_weight(self) -> float:
        """Return the stored bits of all tensors, per weight."""
        num_bytes = sum(tensors.num_bytes for tensors in self.tensors)
        return 8 * num_bytes / max(1, self.num_parameters_with_drafts)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a checkpoint for the engine. `dtype`: serving dtype of weights, activations and KV.

    max_position_embeddings: longest sequence in tokens, including rope scaling.
    window: the positions that a query sees in some layer, if that limits the longest sequence; 0 otherwise.
    weight_bytes, packed_bytes, card_bytes: bytes of the weights in torch, in the CPU kernels, and on an NVIDIA card.
    token_bytes: bytes of weights that a step of one token reads.
    position_bytes: bytes per position of the longest sequence, such as tables of angles.
    parts, torch_parts: parts that ranks split, in the CPU kernels and in torch; None if the model cannot be split.
    needs_torch: why the kernels cannot serve the model; "" if they can.
    no_card: why the kernels for NVIDIA cards cannot serve the model; "" if they can.
    needs_torch_option: the option responsible for that, such as `dtype`; "" if it depends only on the model.
    quantization: the quantization of the weights, or ""; only the kernels support quantized weights.
    blocks: the types of GGUF's blocks among the weights, or "".
    choices: options that the weights allow, such as `activations`.
    own_blocks: the KV groups have their own block sizes, so the user cannot choose one.
    tokenizer: folder of its tokenizer, if another; "" otherwise.
    hf_overrides: values in place of those of config.json.
    eos_token_ids: end-of-sequence ids of config.json, which generation_config.json may replace.
    """

    path: str = ""
    tokenizer: str = ""
    hf_overrides: dict[str, Any] = {}
    architecture: str = ""
    dtype: str
    num_layers: int
    vocab_size: int
    max_position_embeddings: int
    window: int = 0
    num_parameters: int
    weight_bytes: int
    packed_bytes: int = 0
    card_bytes: int = 0
    token_bytes: int = 0
    position_bytes: int = 0
    parts: ModelParts | None = None
    torch_parts: ModelParts | None = None
    needs_torch: str = "it has no program for the CPU kernels"
    needs_torch_option: str = ""
    no_card: str = "it has no program for NVIDIA cards"
    quantization: str = ""
    blocks: str = ""
    choices: tuple[str, ...] = ()
    own_blocks: bool = False
    eos_token_ids: tuple[int, ...] = ()
    kv_groups: tuple[KVCacheGroupSpec, ...]


def default_model_name(path: str) -> str:
    """Return the default name of a served checkpoint: its folder's name, or `owner/name` inside a hub cache."""
    for part in PurePath(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return PurePath(path).name or path
