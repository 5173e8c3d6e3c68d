"""A layer of DeepSeek V4 in torch."""

from __future__ import annotations

from torch import Tensor

from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.deepseek_v4.attention import Attention, StepView
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.layers import DeepseekV4MoE, HyperConnection, hyper_connection_post, vector
from pypto_serving.model.deepseek_v4.pages import TorchPages
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import TorchWeights


class DeepseekV4Layer:
    """One layer: attention and MoE, each with hyper-connections to the residual streams."""

    def __init__(
        self,
        model: DeepseekV4Config,
        weights: TorchWeights,
        layer: int,
        pages: dict[str, TorchPages],
        comm: TorchCollectives,
    ) -> None:
        prefix, self.eps = model.prefix(layer), model.rms_norm_eps
        self.kind, self.dtype = model.kinds[layer], weights.dtype
        self.norms = [vector(weights, f"{prefix}{part}_norm.weight") for part in ("attn", "ffn")]
        self.hyper_connections = [
            HyperConnection(weights, f"{prefix}hc_{part}", model.hyper, self.eps) for part in ("attn", "ffn")
        ]
        self.attention = Attention(model, weights, layer, pages, comm)
        self.moe = DeepseekV4MoE(model, weights, layer, comm)

    def __call__(self, h: Tensor, view: StepView) -> Tensor:
        """Compute one layer over streams h [t, n, hidden], float32, and write the cache rows of the step's tokens."""
        x, post, comb = self.hyper_connections[0].pre(h)
        h = hyper_connection_post(h, self.attention(rms_norm(x, self.norms[0], self.eps), view), post, comb)
        x, post, comb = self.hyper_connections[1].pre(h)
        y = self.moe(rms_norm(x, self.norms[1], self.eps), view.rows.token_ids, self.dtype)
        return hyper_connection_post(h, y, post, comb)

    def linears(self) -> list[Linear]:
        return [
            *(hyper_connection.fn for hyper_connection in self.hyper_connections),
            *self.attention.linears(),
            *self.moe.linears(),
        ]
