"""DeepSeek V4 in readable torch: one step over packed rows with six paged cache families."""

from __future__ import annotations

import torch
from torch import Tensor

from pypto_serving.model.attention import StepTensors
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.deepseek_v4.attention import Attention, StepSlots, StepView, TorchPages
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.deepseek_v4.layers import (
    MIN_ROWS,
    DeepseekV4MoE,
    HyperConnection,
    hyper_connection_post,
    matrix,
    vector,
)
from pypto_serving.model.layers import Embedding, rms_norm, settle_rows
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.rope import rope_tables
from pypto_serving.types.config import EngineConfig


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


class DraftLayer:
    """An SWA layer over e_proj rms(embedding) + h_proj rms(stream), for each stream of the previous token.

    The streams of all tokens are in the KV group `streams`, so a row of the layer does not depend on later tokens.
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
        """Write the tokens' streams h [t, n, hidden] after the last layer."""
        self.streams.write(rows.slots["streams"], h.flatten(1))

    def write_rows(self, embedded: Tensor, view: StepView) -> None:
        """Write only the rows of the KV cache, which suffice for later tokens."""
        x, _, _ = self.layer.hyper_connections[0].pre(self._join(embedded, view.rows))
        self.layer.attention.write_rows(rms_norm(x, self.layer.norms[0], self.eps), view)

    def __call__(self, embedded: Tensor, view: StepView) -> Tensor:
        """Compute the streams [t, n, hidden] of tokens with these embeddings [t, hidden], float32."""
        return self.layer(self._join(embedded, view.rows), view)

    def _join(self, embedded: Tensor, rows: StepSlots) -> Tensor:
        """Join embeddings [t, hidden] with the previous tokens' streams: float32 [t, n, hidden]."""
        tokens, hidden = torch.arange(len(embedded), device=embedded.device), embedded.shape[1]
        before = rows.positions[:, None] - 1
        streams = self.streams.read(rows.find("streams", tokens, before, before >= 0)).view(-1, hidden)
        parts = (self.token, embedded, self.token_norm), (self.stream, streams, self.stream_norm)
        token, stream = (
            self._comm.columns(linear(rms_norm(x, norm, self.eps).to(linear.dtype)), hidden).float()
            for linear, x, norm in parts
        )
        return stream.view(len(embedded), -1, hidden) + token[:, None]


class DeepseekV4Program:
    """Owns weights and cache pages of a DeepSeek V4 model, or a rank's part. `rows` is the fewest rows of a step.

    Residual streams, compressor states, hyper-connections and routing are float32 whatever dtype the weights have.
    Weights and pages lie on torch's default device at construction; a step's tensors must lie there too.
    """

    name = "deepseek-v4-torch-2"

    def __init__(
        self, model: DeepseekV4Config, weights: TorchWeights, config: EngineConfig, comm: TorchCollectives | None = None
    ) -> None:
        inventory = DeepseekV4Inventory(model)
        weights.require(inventory.expected(), inventory.ignores)
        self.model, self._comm = model, comm or TorchCollectives()
        device = torch.get_default_device()
        self._groups = {
            group.name: TorchPages(group, count, self._comm)
            for group, count in zip(config.cache.groups, config.cache.num_blocks, strict=True)
        }
        self.pages = tuple(pages.blocks for pages in self._groups.values())
        mine = self._comm.rank.vocabulary(model.vocab_size)
        self.embedding = Embedding(weights.read("embed.weight", rows=[mine]), self._comm, mine)
        self.layers = [
            DeepseekV4Layer(model, weights, layer, self._groups, self._comm) for layer in range(model.num_layers)
        ]
        self.hc_head = HyperConnection(weights, "hc_head", model.hyper, model.rms_norm_eps)
        self.norm, self.head = vector(weights, "norm.weight"), matrix(weights, "head", outputs=mine)
        self.drafting = DraftLayer(model, weights, self._groups, self._comm) if model.drafts else None
        weights.finish()
        self._tables: dict[LayerKind, tuple[Tensor, Tensor]] = {
            kind: (torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))
            for kind, (cos, sin) in rope_tables(model.ropes(), config.limits.max_model_len).items()
        }
        self.rows = settle_rows(self, self._comm, MIN_ROWS)

    def forward(self, step: StepTensors) -> Tensor:
        """Write the cache rows of a step's tokens, then return logits of `step.logits_rows`, float32 [s, vocab]."""
        if not len(step.token_ids):
            return torch.empty(0, self.model.vocab_size, device=self.norm.device)
        rows = StepSlots(step, self._groups)
        views = {kind: self._view(rows, kind) for kind in self._tables}
        embedded = self.embedding(step.token_ids).float()
        h = embedded[:, None].expand(-1, self.model.hyper.streams, -1).contiguous()
        for layer in self.layers:
            h = layer(h, views[layer.kind])
        if self.drafting is not None:
            self.drafting.store(h, rows)
            self.drafting.write_rows(embedded, views["swa"])
        return self._logits(h, step.logits_rows, self.hc_head, self.norm)

    def draft(self, step: StepTensors) -> Tensor:
        """Return the draft layer's logits of `step.logits_rows`, float32 [s, vocab], for tokens that follow all others.

        Its streams are stored in place of the future tokens' streams, for use by the next draft.
        """
        assert self.drafting is not None
        rows = StepSlots(step, self._groups)
        h = self.drafting(self.embedding(step.token_ids).float(), self._view(rows, "swa"))
        self.drafting.store(h, rows)
        return self._logits(h, step.logits_rows, self.drafting.hc_head, self.drafting.norm)

    def _view(self, rows: StepSlots, kind: LayerKind) -> StepView:
        return StepView.of(rows, self._tables[kind], kind, self.model.ratio(kind))

    def _logits(self, h: Tensor, logits_rows: Tensor, hc_head: HyperConnection, norm: Tensor) -> Tensor:
        if not len(logits_rows):
            return torch.empty(0, self.model.vocab_size, device=norm.device)
        x = hc_head.head(h.index_select(0, logits_rows))
        logits = self.head(rms_norm(x, norm, self.model.rms_norm_eps).to(self.head.dtype))
        return self._comm.columns(logits, self.model.vocab_size).float()
