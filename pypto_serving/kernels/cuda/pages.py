"""The KV memory of a device as the kernels see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """The KV blocks of a group, bfloat16, all layers of a block together. Block 0 is the null block.

    `data` is flat: [block][layer][key or value][kv head][token of the block][head_dim]. Strides are in elements.
    """

    data: Tensor
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def head_stride(self) -> int:
        """Return the distance from one kv head to the next of the same block and layer."""
        return self.block_size * self.head_dim

    @property
    def value_stride(self) -> int:
        """Return the distance from a key to its value."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.value_stride

    @property
    def block_stride(self) -> int:
        return self.num_layers * self.layer_stride

    def view(self) -> Tensor:
        """Return `data` as [block, layer, key or value, kv head, token of the block, head_dim]."""
        shape = self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim
        return self.data.view(shape)
