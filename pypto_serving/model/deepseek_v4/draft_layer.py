"""The draft (MTP) layer of DeepSeek V4 in torch: it predicts the token after the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.deepseek_v4.attention import StepView
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.decoder_layer import DeepseekV4Layer
from pypto_serving.model.deepseek_v4.layers import HyperConnection, matrix, vector
from pypto_serving.model.deepseek_v4.pages import StepSlots, TorchPages
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import TorchWeights


class DraftLayer:
    """An SWA layer over e_proj rms(embedding) + h_proj rms(stream), of a token and each stream of the token before.

    The streams of all tokens lie in the KV group `streams`, so a row of the layer depends on no later token.
    """

    def __init__(
        self, model: DeepseekV4Config, weights: TorchWeights, pages: dict[str, TorchPages], comm: TorchCollectives
    ) -> None:
        (layer,) = model.drafts
        prefix, self.eps, self._comm = model.prefix(layer), model.rms_norm_eps, comm
        self.layer = DeepseekV4Layer(model, weights, layer, pages, comm)
        self.token_norm, self.stream_norm = (vector(weights, f"{prefix}{name}norm.weight") for name in ("e", "h"))
        own = comm.rank.columns(model.hidden_size)
        self.token, self.stream = (matrix(weights, f"{prefix}{name}_proj", outputs=own) for name in ("e", "h"))
        self.hc_head = HyperConnection(weights, f"{prefix}hc_head", model.hyper, self.eps)
        self.norm = vector(weights, f"{prefix}norm.weight")
        self.streams = pages["streams"].layer("stream", layer)

    def store(self, h: Tensor, rows: StepSlots) -> None:
        """Write the streams h [t, n, hidden] that tokens have after the last layer."""
        self.streams.write(rows.slots["streams"], h.flatten(1))

    def write_rows(self, embedded: Tensor, view: StepView) -> None:
        """Write the rows of the KV cache alone, which are all that later tokens need."""
        x, _, _ = self.layer.hyper_connections[0].pre(self._join(embedded, view.rows))
        self.layer.attention.write_rows(rms_norm(x, self.layer.norms[0], self.eps), view)

    def __call__(self, embedded: Tensor, view: StepView) -> Tensor:
        """Compute the streams [t, n, hidden] of tokens with these embeddings [t, hidden], float32."""
        return self.layer(self._join(embedded, view.rows), view)

    def _join(self, embedded: Tensor, rows: StepSlots) -> Tensor:
        """Join embeddings [t, hidden] with the streams of the tokens before: float32 [t, n, hidden]."""
        tokens, hidden = torch.arange(len(embedded), device=embedded.device), embedded.shape[1]
        before = rows.positions[:, None] - 1
        streams = self.streams.read(rows.find("streams", tokens, before, before >= 0)).view(-1, hidden)
        parts = (self.token, embedded, self.token_norm), (self.stream, streams, self.stream_norm)
        token, stream = (
            self._comm.columns(linear(rms_norm(x, norm, self.eps).to(linear.dtype)), hidden).float()
            for linear, x, norm in parts
        )
        return stream.view(len(embedded), -1, hidden) + token[:, None]

    def linears(self) -> list[Linear]:
        return [*self.layer.linears(), self.token, self.stream, self.hc_head.fn]
