"""The tensors of a checkpoint, derived from config.json: the common part of all families. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pypto_serving.kernels.constants import PANEL
from pypto_serving.model.checkpoint import BLOCKS, INT64, ITEM_BYTES, Expected, StoredTensor
from pypto_serving.model.formats.schemes import PLAIN, Scheme, held, packed_bytes
from pypto_serving.model.stored_names import OTHER_PARTS
from pypto_serving.parallel.topology import ModelParts, Split, SplitWeights, TokenBytes, merged
from pypto_serving.types.kv import DTYPE_BYTES
from pypto_serving.types.model import ModelSpec

Shape = tuple[int, ...]
STORED_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The dtypes of config.json by their safetensors names."""

Role = Literal["plain", "precise", "router", "float", "ids", "latent", "linear", "expert"]
"""The role of a tensor.

`plain`, `precise` and `router` tensors have the checkpoint's dtype, bfloat16 in releases; the latter two are used in
float32, and kernels store routers in float32. `float` tensors are float32 everywhere, `ids` int64. The others are
matrices, which may be quantized: of a latent, large linear layers, or an expert.
"""
MATRICES: tuple[Role, ...] = ("latent", "linear", "expert")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a model: its logical shape and its role."""

    shape: Shape
    role: Role = "plain"

    @property
    def count(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A tensor in the form of a file."""

    dtype: str
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of a linear layer: how it is stored, the number of its weights, and its tensors by name."""

    scheme: str
    num_parameters: int
    tensors: tuple[str, ...]


def module_of(name: str) -> str:
    """Return the module whose weight is called `name`."""
    return name.removesuffix(".weight")


class Inventory:
    """The tensors of a checkpoint; a family lists them. `mtp` includes draft (MTP) layers that are not read.

    model, drafts: tensors by name; `drafts` are those of draft layers that are not read.
    schemes: the scheme of each matrix of both, by module; `headers`, if any, decide if `ways` leaves a choice.
    tied: whether the embedding is also the output layer. embeds_last: whether the last stage needs the embedding.

    layer: prefix of the names of a layer's tensors. splits: how ranks split a matrix, by the last component of its
    name; they hold others whole. units: number of outputs that stay together, if not a panel.
    """

    layer: ClassVar[re.Pattern[str]]
    embedding: ClassVar[str]
    splits: ClassVar[Mapping[str, Split]]
    units: ClassVar[Mapping[str, int]]
    endings: ClassVar[tuple[str, ...]] = (".weight",)

    def __init__(
        self,
        config: Any,
        model: Mapping[str, Tensor],
        ways: Callable[[str, Role], tuple[Scheme, ...]],
        headers: Mapping[str, StoredTensor] | None,
        drafts: Mapping[str, Tensor] | None = None,
        head: str = "",
        tied: bool = False,
        embeds_last: bool = False,
    ) -> None:
        self.model, self.drafts = dict(model), dict(drafts or {})
        self.config, self._headers, self._head = config, headers or {}, head
        self._tied, self._embeds_last = tied, embeds_last
        self.schemes: dict[str, Scheme] = {}
        for name, tensor in self._all(True).items():
            if tensor.role in MATRICES:
                module = module_of(name)
                found = ways(module, tensor.role)
                chooses = len(found) > 1 and bool(self._headers)
                self.schemes[module] = held(found, self._headers, module, *tensor.shape) if chooses else found[0]

    def scheme(self, name: str) -> Scheme:
        """Return the scheme of the tensor `name`."""
        return self.schemes.get(module_of(name), PLAIN)

    @property
    def blocks(self) -> dict[str, str]:
        """Return the type of each tensor that the files have in GGUF's blocks."""
        stored = {name: self._headers[name].dtype for name in self.model if name in self._headers}
        return {name: dtype for name, dtype in stored.items() if dtype in BLOCKS}

    def sizes(self) -> dict[str, Shape]:
        """Return [n, k] of every matrix of the model by module."""
        return {module_of(name): tensor.shape for name, tensor in self.model.items() if tensor.role in MATRICES}

    def expected(self, mtp: bool = False) -> dict[str, Expected]:
        """List every required tensor by name."""
        tensors: dict[str, Expected] = {}
        for name, tensor in self._all(mtp).items():
            if tensor.role in MATRICES:
                tensors |= self.scheme(name).expected(module_of(name), *tensor.shape)
            elif tensor.role == "ids":
                tensors[name] = Expected(tensor.shape, (INT64,))
            else:
                usual = "F32" if tensor.role == "float" else ""
                tensors[name] = Expected(tensor.shape, usual=usual, blocks=name == self.embedding)
        return tensors

    def tensors(self) -> dict[str, Shape]:
        """Return the shape of every required tensor by name."""
        return {name: wanted.shape for name, wanted in self.expected().items()}

    def stored(self, dtype: str = "bfloat16", mtp: bool = True) -> dict[str, StoredBytes]:
        """Return every tensor in the form of files. Weights have `dtype`, a key of STORED_DTYPES, unless quantized."""

        def usual(wanted: Expected) -> str:
            return wanted.usual or (wanted.dtypes[0] if len(wanted.dtypes) == 1 else STORED_DTYPES[dtype])

        return {name: StoredBytes(usual(wanted), wanted.shape) for name, wanted in self.expected(mtp).items()}

    def matrices(self) -> Iterator[StoredMatrix]:
        """Yield the matrices of linear layers, without draft layers. A tied embedding is not among them."""
        for name, tensor in self.model.items():
            if tensor.role in MATRICES:
                scheme = self.scheme(name)
                tensors = scheme.expected(module_of(name), *tensor.shape)
                yield StoredMatrix(scheme.name, tensor.count, tuple(tensors))

    def num_parameters(self, mtp: bool = False) -> int:
        """Count the elements of all float tensors before quantisation."""
        return sum(tensor.count for tensor in self._all(mtp).values() if tensor.role != "ids")

    def ignores(self, name: str) -> bool:
        """Return True for tensors that nothing reads: here layers after the last one, and parts beside the decoder."""
        layer = self.layer.match(name)
        return bool(OTHER_PARTS.fullmatch(name)) or (layer is not None and int(layer[1]) >= self.config.num_layers)

    def packed_bytes(self, item_bytes: int = 2, head: Scheme | None = None) -> dict[str, int]:
        """Count the bytes of every tensor in the kernels; elements of unquantized matrices have `item_bytes`.

        `head`: scheme of the output layer, if it is not kept as stored. An embedding that is only looked up is a table;
        routers, vectors and other tensors used in float32 are float32.
        """
        sizes, blocks = {}, self.blocks
        for name, tensor in self.model.items():
            module = module_of(name)
            if name == self.embedding and not self._tied and name not in blocks:
                sizes[name] = item_bytes * tensor.count
            elif tensor.role in ("float", "ids", "router") or len(tensor.shape) == 1:
                sizes[name] = 4 * tensor.count
            else:
                scheme = head if head and module == self._head else self.scheme(name)
                n, k = tensor.shape
                size = packed_bytes(scheme, self._headers, module, n, k, self._unit(name))
                sizes[name] = size * item_bytes // 2 if scheme == PLAIN and name not in blocks else size
        return sizes

    def torch_bytes(self, item_bytes: int) -> dict[str, int]:
        """Count the bytes of every tensor in torch. A tied embedding is in memory twice: as table and packed."""
        items = {"precise": 4, "router": 4, "float": 4, "ids": 8}
        sizes = {name: tensor.count * items.get(tensor.role, item_bytes) for name, tensor in self.model.items()}
        return sizes | ({self.embedding: 2 * sizes[self.embedding]} if self._tied else {})

    def token_share(self, name: str) -> Fraction:
        """Return the fraction of the tensor `name` that a token reads on average: of experts, the chosen ones."""
        role = self.model[name].role
        if role == "expert":
            return Fraction(self.config.experts.per_token, self.config.experts.count)
        return Fraction(int(role != "ids" and (name != self.embedding or self._tied)))

    def split(self, name: str, num_bytes: int) -> list[SplitWeights]:
        """Describe how ranks split the tensor `name` of `num_bytes`; experts are split by experts, too."""
        tensor = self.model[name]
        whole = SplitWeights(
            layers=self._stages(name),
            split="experts" if tensor.role == "expert" else self.splits.get(self._part(name), "whole"),
            outputs=tensor.shape[0],
            unit=self._unit(name),
            num_bytes=num_bytes,
        )
        return [whole]

    def _part(self, name: str) -> str:
        """Return the last component of the name of a module."""
        for ending in self.endings:
            name = name.removesuffix(ending)
        return name.rpartition(".")[2]

    def _unit(self, name: str) -> int:
        return self.units.get(self._part(name), PANEL)

    def _stages(self, name: str) -> tuple[int, ...]:
        """Return the layers whose stages hold a tensor; draft layers are in the last one."""
        if layer := self.layer.match(name):
            return (int(layer[1]),)
        last = (self.config.num_layers - 1,)
        if name != self.embedding:
            return last
        return (0, *last) if self._embeds_last else (0,)

    def _all(self, mtp: bool) -> dict[str, Tensor]:
        return self.model | self.drafts if mtp else self.model


def describe_model(
    config: Any, inventory: Inventory, dtype: str, packed: Mapping[str, int], token: TokenBytes, **own: Any
) -> ModelSpec:
    """Describe a checkpoint to the engine: the common fields of all families, and a family's `own` ones.

    `packed`: bytes of weights in the kernels; `token`: bytes of a token's activations.
    """
    in_torch = inventory.torch_bytes(DTYPE_BYTES[dtype])

    def parts(sizes: Mapping[str, int]) -> ModelParts:
        return ModelParts(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            hidden_size=config.hidden_size,
            num_experts=config.experts.count if config.experts is not None else 0,
            weights=merged(part for name, size in sizes.items() for part in inventory.split(name, size)),
            token=token,
        )

    return ModelSpec(
        dtype=dtype,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_parameters=inventory.num_parameters(),
        weight_bytes=sum((packed if own["quantization"] or inventory.blocks else in_torch).values()),
        packed_bytes=sum(packed.values()),
        token_bytes=int(sum(inventory.token_share(name) * size for name, size in packed.items())),
        parts=parts(packed),
        torch_parts=parts(in_torch),
        blocks=" + ".join(sorted({*inventory.blocks.values()})),
        **own,
    )
