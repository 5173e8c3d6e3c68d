"""Attention of DeepSeek V4: one shared latent as key and value of all heads, over a window and compressed entries.

Every query gathers its own rows: a window at places that count back from it, then entries in order, filled up to
whole tiles. So a query's products have a size that only its own position decides, and the same arithmetic serves
prefill and decode, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.model.deepseek_v4.compressor import Closing, Compressor
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.layers import matrix, rotate, vector
from pypto_serving.model.deepseek_v4.pages import LayerRows, Pages, StepRows
from pypto_serving.model.deepseek_v4.parts import LayerKind
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import Weights

TILE = 64
"""Entries are read in multiples of this."""

_GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StepView:
    """What layers of one kind share in a step: rotation of tokens and of closing windows, and what can be seen.

    `visible` [t] counts the compressed entries before each token, its own window included if it closes one.
    """

    rows: StepRows
    turn: tuple[Tensor, Tensor]
    closing: Closing
    closing_turn: tuple[Tensor, Tensor]
    visible: Tensor

    @classmethod
    def of(cls, rows: StepRows, tables: tuple[Tensor, Tensor], kind: LayerKind, ratio: int) -> StepView:
        """The view of layers of `kind`, which rotate by `tables`."""
        closing = Closing.of(rows, ratio, ratio if kind == "csa" else 0)
        visible = (rows.positions + 1) // ratio if ratio else torch.zeros_like(rows.positions)

        def turn(positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (table.index_select(0, positions) for table in tables)
            return cos, sin

        return cls(rows, turn(rows.positions), closing, turn(closing.first), visible)


def same_width(counts: Tensor, fixed: int, row_bytes: int) -> Iterator[tuple[Tensor, int]]:
    """Tokens that read equally many rows, (places [n], rows beside the `fixed` ones), few enough to gather at once."""
    widths = (counts + TILE - 1) // TILE * TILE
    for width in widths.unique().tolist():
        together = max(1, _GATHERED_BYTES // ((fixed + width) * row_bytes))
        for tokens in (widths == width).nonzero().flatten().split(together):
            yield tokens, width


class Chooser:
    """The indexer of a CSA layer: chooses the entries whose keys fit the query best, of equal ones the earlier."""

    def __init__(self, model: DeepseekV4Config, weights: Weights, prefix: str, keys: LayerRows) -> None:
        assert model.indexer is not None
        self.sizes, self.keys = model.indexer, keys
        self.query = matrix(weights, f"{prefix}wq_b")
        self.weigh = matrix(weights, f"{prefix}weights_proj", dtype=torch.float32)

    def __call__(self, latent: Tensor, x: Tensor, view: StepView) -> Tensor:
        """Entries to attend to, ascending, int64 [t, most]; as many of a row count as are visible, at most topk.

        `latent` [t, rank] is what queries are made of, x [t, hidden] the layer's input in float32.
        """
        topk, device = self.sizes.topk, x.device
        most = min(topk, int(view.visible.max()))
        chosen = torch.arange(most, device=device).repeat(len(x), 1)
        crowded = (view.visible > topk).nonzero().flatten()
        if len(crowded):
            heads = self.query(latent).float().view(len(x), self.sizes.num_heads, self.sizes.head_dim)
            heads = rotate(heads, *view.turn)
            weights = self.weigh(x) * (self.sizes.num_heads * self.sizes.head_dim) ** -0.5
            for places, width in same_width(view.visible[crowded], 0, 4 * self.sizes.head_dim):
                tokens = crowded[places]
                chosen[tokens] = self._best(heads[tokens], weights[tokens], tokens, width, view)
        return chosen

    def _best(self, heads: Tensor, weights: Tensor, tokens: Tensor, width: int, view: StepView) -> Tensor:
        """The best topk of the first `width` entries for `tokens` [n]: score = sum of weight * relu(query . key)."""
        entries = torch.arange(width, device=heads.device)
        exists = entries < view.visible[tokens][:, None]
        slots = view.rows.find("idx", tokens, (entries * self.keys.ratio).expand(len(tokens), -1), exists)
        matches = torch.bmm(heads, self.keys.read(slots).transpose(1, 2)).relu_()
        scores = torch.bmm(weights[:, None], matches)[:, 0].masked_fill_(~exists, -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        return order[:, : self.sizes.topk].sort(dim=1).values

    def linears(self) -> list[Linear]:
        return [self.query, self.weigh]


class Attention:
    """One layer's attention: projections, cache rows, compressed entries, and the grouped output projection."""

    def __init__(self, model: DeepseekV4Config, weights: Weights, layer: int, pages: dict[str, Pages]) -> None:
        prefix, kind = f"layers.{layer}.attn.", model.kinds[layer]
        self.model, self.kind = model, kind
        self.query_latent, self.query = matrix(weights, f"{prefix}wq_a"), matrix(weights, f"{prefix}wq_b")
        self.latent = matrix(weights, f"{prefix}wkv")
        self.query_norm, self.norm = (vector(weights, f"{prefix}{name}_norm.weight") for name in ("q", "kv"))
        self.sink = vector(weights, f"{prefix}attn_sink")
        groups = weights.lend(f"{prefix}wo_a.weight").chunk(model.o_groups)
        self.out_latents = [Linear(group) for group in groups]
        self.out = matrix(weights, f"{prefix}wo_b")
        self.rows = pages["ori"].layer("kv", layer)
        self.compressors: list[tuple[Compressor, LayerRows, LayerRows]] = []
        self.chooser: Chooser | None = None
        if kind != "swa":
            self.entries = pages["cmp"].layer(kind, layer)
            state = f"{kind}_state"
            compressor = Compressor(model, weights, f"{prefix}compressor.", kind, model.head_dim, (state, "cmp"))
            self.compressors.append((compressor, pages[state].layer("state", layer), self.entries))
        if kind == "csa":
            assert model.indexer is not None
            keys, state, dim = pages["idx"].layer("key", layer), "csa_inner_state", model.indexer.head_dim
            compressor = Compressor(model, weights, f"{prefix}indexer.compressor.", kind, dim, (state, "idx"))
            self.compressors.append((compressor, pages[state].layer("state", layer), keys))
            self.chooser = Chooser(model, weights, f"{prefix}indexer.", keys)

    def __call__(self, x: Tensor, view: StepView) -> Tensor:
        """Float32 [t, hidden] to [t, hidden]; writes the cache rows of the step's tokens."""
        model, eps, dtype = self.model, self.model.rms_norm_eps, self.out.dtype
        rounded = x.to(dtype)
        latent = rms_norm(self.query_latent(rounded).float(), self.query_norm, eps).to(dtype)
        heads = self.query(latent).float().view(len(x), model.num_heads, model.head_dim)
        heads = rotate(rms_norm(heads, None, eps), *view.turn) * model.head_dim**-0.5
        shared = rotate(rms_norm(self.latent(rounded).float(), self.norm, eps), *view.turn)
        self.rows.write(view.rows.slots["ori"], shared)
        for compressor, state, entries in self.compressors:
            compressor(x, view.rows, view.closing, view.closing_turn, state, entries)
        chosen = self.chooser(latent, x, view) if self.chooser is not None else None
        cos, sin = view.turn
        attended = rotate(self._attend(heads, view, chosen), cos, -sin)
        parts = attended.to(dtype).view(len(x), model.o_groups, -1).unbind(1)
        joined = torch.cat([linear(part.contiguous()) for linear, part in zip(self.out_latents, parts, strict=True)], 1)
        return self.out(joined).float()

    def _attend(self, heads: Tensor, view: StepView, chosen: Tensor | None) -> Tensor:
        """Softmax over window, entries and sink: scaled queries [t, heads, dim] to [t, heads, dim]."""
        counts, out = view.visible, torch.empty_like(heads)
        if chosen is not None:
            counts = counts.clamp(max=chosen.shape[1])
        for tokens, width in same_width(counts, self.model.window, 4 * self.model.head_dim):
            rows, exists = self._gather(tokens, width, counts, view, chosen)
            scores = torch.bmm(heads[tokens], rows.transpose(1, 2)).masked_fill_(~exists[:, None], -torch.inf)
            sinks = self.sink[None, :, None].expand(len(tokens), -1, 1)
            shares = torch.softmax(torch.cat([scores, sinks], dim=2), dim=2)
            out.index_copy_(0, tokens, torch.bmm(shares[..., :-1].contiguous(), rows))
        return out

    def _gather(
        self, tokens: Tensor, width: int, counts: Tensor, view: StepView, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What `tokens` [n] attend to, [n, window + width, dim], and which of it exists, [n, window + width]."""
        window, device = self.model.window, tokens.device
        positions = view.rows.positions[tokens][:, None] + torch.arange(1 - window, 1, device=device)
        exists = positions >= 0
        rows = self.rows.read(view.rows.find("ori", tokens, positions, exists))
        if not width:
            return rows, exists
        entries = torch.arange(width, device=device).expand(len(tokens), -1)
        there = entries < counts[tokens][:, None]
        if chosen is not None:
            entries = torch.nn.functional.pad(chosen[tokens][:, :width], (0, max(0, width - chosen.shape[1])))
        slots = view.rows.find("cmp", tokens, entries * self.model.ratio(self.kind), there)
        return torch.cat([rows, self.entries.read(slots)], dim=1), torch.cat([exists, there], dim=1)

    def linears(self) -> list[Linear]:
        linears = [self.query_latent, self.query, self.latent, self.out, *self.out_latents]
        linears += [linear for compressor, _, _ in self.compressors for linear in compressor.linears()]
        return linears + (self.chooser.linears() if self.chooser is not None else [])
