"""Attention of DeepSeek V4: MLA over a sliding window and compressed entries. One latent is key and value of all heads.

Every query gathers its own rows: first its window, then compressed entries in order, padded to whole tiles. The size of
a query's products depends only on its position. So prefill and decode compute the same bits, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.model.attention import StepTensors
from pypto_serving.model.collectives import TorchCollectives
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config, LayerKind
from pypto_serving.model.deepseek_v4.layers import apply_rope, matrix, vector
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import TorchWeights, torch_dtype
from pypto_serving.model.products import cut, rows_of
from pypto_serving.parallel.topology import Rank
from pypto_serving.types.kv import KVCacheGroupSpec


class TorchPages:
    """Owns the blocks of one KV group whose rows all have one width: `rows` [blocks * rows per block, width].

    A block holds tensor after tensor, and each tensor layer after layer. A hidden last block stays zero and is read for
    positions that do not exist. Memory is committed when first written. All ranks share the blocks.
    """

    def __init__(self, group: KVCacheGroupSpec, num_blocks: int, comm: TorchCollectives) -> None:
        tensors = group.tensors
        (width,) = {tensor.row_shape[0] for tensor in tensors}
        with torch.inference_mode(False):  # code outside inference mode may also write pages
            memory = comm.pages((num_blocks + 1) * group.block_bytes).view(num_blocks + 1, -1)
            self.blocks = memory.view(torch_dtype(tensors[0].dtype))
        self.rows = self.blocks.view(-1, width)
        self.block_size, self.zero_block = group.block_size, num_blocks
        self.rows_per_block = self.blocks.shape[1] // width
        self._starts: dict[tuple[str, int], tuple[int, int]] = {}
        start = 0
        for tensor in tensors:
            for layer in tensor.layers:
                self._starts[tensor.name, layer] = (start, tensor.ratio)
                start += group.block_size // tensor.ratio

    def layer(self, tensor: str, layer: int) -> LayerRows:
        """Return the rows of one tensor in one layer."""
        return LayerRows(self, *self._starts[tensor, layer])


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one tensor in one layer. Slots count source tokens; `ratio` of them share a row."""

    pages: TorchPages
    start: int
    ratio: int

    def _index(self, slots: Tensor) -> Tensor:
        block, offset = slots // self.pages.block_size, slots % self.pages.block_size
        return block * self.pages.rows_per_block + self.start + offset // self.ratio

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store `values` [n, width] in `slots` [n]."""
        self.pages.rows.index_copy_(0, self._index(slots), values.to(self.pages.rows.dtype))

    def read(self, slots: Tensor) -> Tensor:
        """Read the rows of `slots` [n, k] in float32, [n, k, width]."""
        return self.pages.rows.index_select(0, self._index(slots).flatten()).float().view(*slots.shape, -1)


class StepSlots:
    """Slots of one step's tokens in every KV group.

    `owners` [t] is the row of each token. Padding belongs to an extra row after the last one, with null blocks.
    """

    def __init__(self, step: StepTensors, pages: Mapping[str, TorchPages]) -> None:
        self.token_ids, self.positions = step.token_ids, step.positions
        places = torch.arange(len(step.token_ids), device=step.positions.device)
        self.owners = torch.searchsorted(step.query_start[1:].contiguous(), places, right=True)
        self.slots = dict(zip(pages, step.slots, strict=True))
        self._pages = pages
        self._tables = {
            name: torch.nn.functional.pad(table, (0, 0, 0, 1))
            for name, table in zip(pages, step.block_tables, strict=True)
        }

    def find(self, group: str, tokens: Tensor, positions: Tensor, exists: Tensor) -> Tensor:
        """Find the slots of `positions` [n, k] in the sequences of `tokens` [n]; a zero row where not `exists`."""
        pages, table = self._pages[group], self._tables[group]
        index = (positions // pages.block_size).clamp(0, table.shape[1] - 1)
        blocks = table[self.owners[tokens][:, None], index].where(exists, pages.zero_block)
        return blocks * pages.block_size + positions % pages.block_size


@dataclass(frozen=True, slots=True)
class ClosedWindows:
    """The n compressor windows that a step's tokens close, in layers of one kind.

    `tokens` [n]: tokens that close them; `first` [n]: position of a window's first token. `positions` [n, span]: tokens
    that an entry covers. `exists` [n, span] masks positions before the sequence.
    """

    tokens: Tensor
    first: Tensor
    positions: Tensor
    exists: Tensor

    @classmethod
    def of(cls, rows: StepSlots, ratio: int, overlap: int) -> ClosedWindows:
        """Find windows of `ratio` tokens. Entries also cover `overlap` tokens before the window. Ratio 0 gives none."""
        closes = (rows.positions + 1) % ratio == 0 if ratio else torch.zeros_like(rows.positions, dtype=torch.bool)
        tokens = closes.nonzero().flatten()
        first = rows.positions[tokens] - ratio + 1
        positions = first[:, None] + torch.arange(-overlap, ratio, device=first.device)
        return cls(tokens, first, positions, positions >= 0)


class Compressor:
    """Compresses windows of tokens into entries of `dim` channels. Its state is a float32 row [kv | gates] per token.

    In CSA layers windows overlap: an entry uses the second half of the channels of its own window, and the first half
    of the previous window's.
    """

    def __init__(
        self,
        model: DeepseekV4Config,
        weights: TorchWeights,
        prefix: str,
        kind: LayerKind,
        dim: int,
        names: tuple[str, str],
        rank: Rank,
    ) -> None:
        self.state_group, self.entry_group = names
        self.kind, self.ratio, self.dim, self.eps = kind, model.ratio(kind), dim, model.rms_norm_eps
        self.width = model.compressed_width(kind, dim)
        own = rank.columns(self.width)
        self.project = matrix(weights, f"{prefix}wkv", f"{prefix}wgate", dtype=torch.float32, outputs=own)
        self.ape, self.norm = vector(weights, f"{prefix}ape"), vector(weights, f"{prefix}norm.weight")

    def __call__(
        self,
        kv: Tensor,
        gates: Tensor,
        rows: StepSlots,
        closed: ClosedWindows,
        rope: tuple[Tensor, Tensor],
        state: LayerRows,
        entries: LayerRows,
    ) -> None:
        """Write the state of projected tokens, and the entries of closed windows.

        `kv` and `gates` [t, width] are the two parts of `project`; `rope` is for the windows' first tokens.
        """
        gates = gates + self.ape.index_select(0, rows.positions % self.ratio)
        state.write(rows.slots[self.state_group], torch.cat([kv, gates], dim=1))
        if not len(closed.tokens):
            return
        slots = rows.find(self.state_group, closed.tokens, closed.positions, closed.exists)
        entry = rms_norm(self._weighted_mean(state.read(slots), closed.exists), self.norm, self.eps)
        entries.write(rows.slots[self.entry_group][closed.tokens], apply_rope(entry, *rope))

    def _weighted_mean(self, state: Tensor, exists: Tensor) -> Tensor:
        """Average kv over the window, weighted by the softmax of the gates: [n, span, kv and gates] to [n, dim]."""
        kv, gates = state.split(self.width, dim=2)
        if self.kind == "csa":
            kv, gates = self._halves(kv), self._halves(gates)
        gates = gates.masked_fill(~exists[..., None], -torch.inf)
        weights = torch.softmax(gates.transpose(1, 2).contiguous(), dim=2)
        return (weights * kv.transpose(1, 2)).sum(dim=2)

    def _halves(self, x: Tensor) -> Tensor:
        """Take the first half of the channels of the earlier window, the second of the later, [n, windows, dim]."""
        return torch.cat([x[:, : self.ratio, : self.dim], x[:, self.ratio :, self.dim :]], dim=1)


TILE = 64
"""Unit in which compressed entries are gathered."""

_GATHERED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StepView:
    """The inputs that all layers of one kind share in a step.

    `rope` and `closed_rope` are cosines and sines of the tokens and of the closed windows. `visible` [t] counts the
    compressed entries that each token sees, including that of a window which the token itself closes.
    """

    rows: StepSlots
    rope: tuple[Tensor, Tensor]
    closed: ClosedWindows
    closed_rope: tuple[Tensor, Tensor]
    visible: Tensor

    @classmethod
    def of(cls, rows: StepSlots, tables: tuple[Tensor, Tensor], kind: LayerKind, ratio: int) -> StepView:
        """Make the view of layers of `kind`; `tables` are their cosines and sines by position."""
        closed = ClosedWindows.of(rows, ratio, ratio if kind == "csa" else 0)
        visible = (rows.positions + 1) // ratio if ratio else torch.zeros_like(rows.positions)

        def rope_at(positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = (table.index_select(0, positions) for table in tables)
            return cos, sin

        return cls(rows, rope_at(rows.positions), closed, rope_at(closed.first), visible)


def same_width(counts: Tensor, fixed: int, row_bytes: int) -> Iterator[tuple[Tensor, int]]:
    """Group tokens by padded row count: yield (tokens [n], rows beside the `fixed` ones).

    Groups are small enough to gather at once.
    """
    widths = (counts + TILE - 1) // TILE * TILE
    for width in widths.unique().tolist():
        together = max(1, _GATHERED_BYTES // ((fixed + width) * row_bytes))
        for tokens in (widths == width).nonzero().flatten().split(together):
            yield tokens, width


def _parts_of_heads(comm: TorchCollectives, num_heads: int, head_dim: int) -> list[range]:
    """Return the outputs of each rank's heads."""
    return comm.parts(lambda rank: rows_of(rank.heads(num_heads), head_dim))


class IndexerTopK:
    """The lightning indexer of a CSA layer: selects the top-k compressed entries of a query.

    Ties go to the earlier entry. Ranks split the projections, but each computes all scores, which sum over all heads.
    """

    def __init__(
        self, model: DeepseekV4Config, weights: TorchWeights, prefix: str, keys: LayerRows, comm: TorchCollectives
    ) -> None:
        assert model.indexer is not None
        self.sizes, self.keys, self._comm = model.indexer, keys, comm
        self._queries = _parts_of_heads(comm, self.sizes.num_heads, self.sizes.head_dim)
        self.query = matrix(weights, f"{prefix}wq_b", outputs=self._queries[comm.rank.index])
        own = comm.rank.columns(self.sizes.num_heads)
        self.head_weights = matrix(weights, f"{prefix}weights_proj", dtype=torch.float32, outputs=own)

    def __call__(self, latent: Tensor, x: Tensor, view: StepView) -> Tensor:
        """Return the entries to attend to, ascending, int64 [t, most].

        A token uses the first min(visible, topk) of its row. `latent` [t, rank] is the query latent, x [t, hidden] the
        layer's input in float32.
        """
        topk, device = self.sizes.topk, x.device
        most = min(topk, int(view.visible.max()))
        topk_indices = torch.arange(most, device=device).repeat(len(x), 1)
        crowded = (view.visible > topk).nonzero().flatten()
        if len(crowded):
            width = self.sizes.num_heads * self.sizes.head_dim
            queries = self._comm.join(self.query(latent), self._queries).float()
            heads = apply_rope(queries.view(len(x), self.sizes.num_heads, self.sizes.head_dim), *view.rope)
            weights = self._comm.columns(self.head_weights(x), self.sizes.num_heads) * width**-0.5
            for places, width in same_width(view.visible[crowded], 0, 4 * self.sizes.head_dim):
                tokens = crowded[places]
                topk_indices[tokens] = self._best(heads[tokens], weights[tokens], tokens, width, view)
        return topk_indices

    def _best(self, heads: Tensor, weights: Tensor, tokens: Tensor, width: int, view: StepView) -> Tensor:
        """Select the top-k of the first `width` entries for `tokens` [n]: score = sum of weight * relu(query . key)."""
        entries = torch.arange(width, device=heads.device)
        exists = entries < view.visible[tokens][:, None]
        slots = view.rows.find("idx", tokens, (entries * self.keys.ratio).expand(len(tokens), -1), exists)
        matches = torch.bmm(heads, self.keys.read(slots).transpose(1, 2)).relu_()
        scores = torch.bmm(weights[:, None], matches)[:, 0].masked_fill_(~exists, -torch.inf)
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices
        return order[:, : self.sizes.topk].sort(dim=1).values


class Attention:
    """One layer's attention: projections, KV cache, compressors, indexer and the grouped output projection.

    Ranks split it by heads, and the outputs of all other matrices. Every rank computes data shared by all heads, such
    as rows of the KV cache, so all write the same bytes.
    """

    def __init__(
        self,
        model: DeepseekV4Config,
        weights: TorchWeights,
        layer: int,
        pages: dict[str, TorchPages],
        comm: TorchCollectives,
    ) -> None:
        prefix, kind, rank = f"{model.prefix(layer)}attn.", model.kinds[layer], comm.rank
        self._first_row = model.first_row(layer)
        self.model, self.kind, self._comm = model, kind, comm
        self.heads = rank.heads(model.num_heads)
        self.attended = _parts_of_heads(comm, model.num_heads, model.head_dim)
        self.q_latent = matrix(weights, f"{prefix}wq_a", outputs=rank.columns(model.q_lora_rank))
        self.query = matrix(weights, f"{prefix}wq_b", outputs=rows_of(self.heads, model.head_dim))
        self.latent = matrix(weights, f"{prefix}wkv", outputs=rank.columns(model.head_dim))
        self.query_norm, self.norm = (vector(weights, f"{prefix}{name}_norm.weight") for name in ("q", "kv"))
        self.sink = vector(weights, f"{prefix}attn_sink")[self.heads.start : self.heads.stop]
        own = rank.columns(model.o_groups * model.o_lora_rank)
        sizes = [len(part) for part in cut([model.o_lora_rank] * model.o_groups, own)]
        groups = weights.lend(f"{prefix}wo_a.weight", rows=[own]).split(sizes)
        self.out_latents = [Linear(group) for group in groups]
        self.out = matrix(weights, f"{prefix}wo_b", outputs=rank.columns(model.hidden_size))
        self.rows = pages["ori"].layer("kv", layer)
        self.compressors: list[tuple[Compressor, LayerRows, LayerRows]] = []
        self.indexer: IndexerTopK | None = None
        if kind != "swa":
            self.entries = pages["cmp"].layer(kind, layer)
            state = f"{kind}_state"
            compressor = Compressor(model, weights, f"{prefix}compressor.", kind, model.head_dim, (state, "cmp"), rank)
            self.compressors.append((compressor, pages[state].layer("state", layer), self.entries))
        if kind == "csa":
            assert model.indexer is not None
            keys, state, dim = pages["idx"].layer("key", layer), "csa_inner_state", model.indexer.head_dim
            compressor = Compressor(model, weights, f"{prefix}indexer.compressor.", kind, dim, (state, "idx"), rank)
            self.compressors.append((compressor, pages[state].layer("state", layer), keys))
            self.indexer = IndexerTopK(model, weights, f"{prefix}indexer.", keys, comm)

    def __call__(self, x: Tensor, view: StepView) -> Tensor:
        """Compute float32 [t, hidden] to [t, hidden], and write the cache rows of the step's tokens."""
        model, eps, dtype = self.model, self.model.rms_norm_eps, self.out.dtype
        q_latent, shared, *projected = self._project(x)
        latent = rms_norm(q_latent, self.query_norm, eps).to(dtype)
        heads = self.query(latent).float().view(len(x), len(self.heads), model.head_dim)
        heads = apply_rope(rms_norm(heads, None, eps), *view.rope) * model.head_dim**-0.5
        self._write_row(shared, view)
        for compressor, state, entries in self.compressors:
            kv, gates, *projected = projected
            compressor(kv, gates, view.rows, view.closed, view.closed_rope, state, entries)
        topk_indices = self.indexer(latent, x, view) if self.indexer is not None else None
        cos, sin = view.rope
        attended = apply_rope(self._attend(heads, view, topk_indices), cos, -sin)
        return self._output(attended.to(dtype).flatten(1))

    def write_rows(self, x: Tensor, view: StepView) -> None:
        """Write the cache rows of an SWA layer for float32 x [t, hidden], and compute nothing else."""
        _, shared = self._project(x)
        self._write_row(shared, view)

    def _write_row(self, shared: Tensor, view: StepView) -> None:
        rows = apply_rope(rms_norm(shared, self.norm, self.model.rms_norm_eps), *view.rope)
        self.rows.write(view.rows.slots["ori"], rows)

    def _project(self, x: Tensor) -> list[Tensor]:
        """Project the input, float32: the query latent, the shared latent, and kv and gates of each compressor."""
        rounded = x.to(self.out.dtype)
        parts = [self.q_latent(rounded).float(), self.latent(rounded).float()]
        widths = [self.model.q_lora_rank, self.model.head_dim]
        for compressor, _, _ in self.compressors:
            parts += compressor.project(x).chunk(2, dim=1)
            widths += [compressor.width] * 2
        return self._comm.join_several(parts, [self._comm.split(width) for width in widths])

    def _output(self, attended: Tensor) -> Tensor:
        """Project the rank's heads [t, own * head_dim], by groups of all heads: float32 [t, hidden]."""
        model, comm = self.model, self._comm
        groups = comm.join(attended, self.attended).view(len(attended), model.o_groups, -1)
        parts = [linear(x.contiguous()) for linear, x in zip(self.out_latents, groups.unbind(1), strict=True)]
        joined = comm.columns(torch.cat(parts, 1), model.o_groups * model.o_lora_rank)
        return comm.columns(self.out(joined), model.hidden_size).float()

    def _attend(self, heads: Tensor, view: StepView, topk_indices: Tensor | None) -> Tensor:
        """Attend to window, compressed entries and sink: scaled queries [t, heads, dim] to [t, heads, dim]."""
        counts, out = view.visible, torch.empty_like(heads)
        if topk_indices is not None:
            counts = counts.clamp(max=topk_indices.shape[1])
        for tokens, width in same_width(counts, self.model.window, 4 * self.model.head_dim):
            rows, exists = self._gather(tokens, width, counts, view, topk_indices)
            scores = torch.bmm(heads[tokens], rows.transpose(1, 2)).masked_fill_(~exists[:, None], -torch.inf)
            sinks = self.sink[None, :, None].expand(len(tokens), -1, 1)
            weights = torch.softmax(torch.cat([scores, sinks], dim=2), dim=2)
            out.index_copy_(0, tokens, torch.bmm(weights[..., :-1].contiguous(), rows))
        return out

    def _gather(
        self, tokens: Tensor, width: int, counts: Tensor, view: StepView, topk_indices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gather the rows that `tokens` [n] attend to, [n, window + width, dim], and their mask."""
        window, device = self.model.window, tokens.device
        positions = view.rows.positions[tokens][:, None] + torch.arange(1 - window, 1, device=device)
        exists = positions >= self._first_row
        rows = self.rows.read(view.rows.find("ori", tokens, positions, exists))
        if not width:
            return rows, exists
        entries = torch.arange(width, device=device).expand(len(tokens), -1)
        there = entries < counts[tokens][:, None]
        if topk_indices is not None:
            entries = torch.nn.functional.pad(
                topk_indices[tokens][:, :width], (0, max(0, width - topk_indices.shape[1]))
            )
        slots = view.rows.find("cmp", tokens, entries * self.model.ratio(self.kind), there)
        return torch.cat([rows, self.entries.read(slots)], dim=1), torch.cat([exists, there], dim=1)
