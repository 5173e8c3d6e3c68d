"""The KV compressor: one compressed entry per window of tokens, a gated mean in each channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.layers import apply_rope, matrix, vector
from pypto_serving.model.deepseek_v4.pages import LayerRows, StepSlots
from pypto_serving.model.deepseek_v4.parts import LayerKind
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import TorchWeights
from pypto_serving.parallel.topology import Rank


@dataclass(frozen=True, slots=True)
class ClosedWindows:
    """The n compressor windows that a step's tokens close, in layers of one kind.

    `tokens` [n] close them; `first` [n] is the position of a window's first token. `positions` [n, span] are the tokens
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
    of the window before.
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

        `kv` and `gates` [t, width] are the two parts of `project`, `rope` is that of the windows' first tokens.
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

    def linears(self) -> list[Linear]:
        return [self.project]
