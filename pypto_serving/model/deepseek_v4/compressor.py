"""Compressed entries: one row for every few tokens, a mean that each channel weighs by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.layers import matrix, rotate, vector
from pypto_serving.model.deepseek_v4.pages import LayerRows, StepRows
from pypto_serving.model.deepseek_v4.parts import LayerKind
from pypto_serving.model.layers import Linear, rms_norm
from pypto_serving.model.loader import Weights


@dataclass(frozen=True, slots=True)
class Closing:
    """The n windows that a step's tokens close, in layers of one kind.

    `first` [n] is the position of a window's first token. `exists` [n, span] marks which of the tokens that an entry
    is made of there are: before the first window there are none.
    """

    tokens: Tensor
    first: Tensor
    positions: Tensor
    exists: Tensor

    @classmethod
    def of(cls, rows: StepRows, ratio: int, overlap: int) -> Closing:
        """Windows of `ratio` tokens, entries of which begin `overlap` tokens before the window; none for ratio 0."""
        closes = (rows.positions + 1) % ratio == 0 if ratio else torch.zeros_like(rows.positions, dtype=torch.bool)
        tokens = closes.nonzero().flatten()
        first = rows.positions[tokens] - ratio + 1
        positions = first[:, None] + torch.arange(-overlap, ratio, device=first.device)
        return cls(tokens, first, positions, positions >= 0)


class Compressor:
    """Makes entries of `dim` channels; its state is one row [keys | gates] for every token, float32.

    In CSA layers an entry is made of its own window, with the second half of the channels, and of the window before
    it, with the first half.
    """

    def __init__(
        self, model: DeepseekV4Config, weights: Weights, prefix: str, kind: LayerKind, dim: int, names: tuple[str, str]
    ) -> None:
        self.state_group, self.entry_group = names
        self.kind, self.ratio, self.dim, self.eps = kind, model.ratio(kind), dim, model.rms_norm_eps
        self.width = model.compressed_width(kind, dim)
        self.project = matrix(weights, f"{prefix}wkv", f"{prefix}wgate", dtype=torch.float32)
        self.ape, self.norm = vector(weights, f"{prefix}ape"), vector(weights, f"{prefix}norm.weight")

    def __call__(
        self,
        x: Tensor,
        rows: StepRows,
        closing: Closing,
        turn: tuple[Tensor, Tensor],
        state: LayerRows,
        entries: LayerRows,
    ) -> None:
        """Write the state of x [t, hidden] and the entries of windows that close, which `turn` rotates."""
        keys, gates = self.project(x).split(self.width, dim=1)
        gates = gates + self.ape.index_select(0, rows.positions % self.ratio)
        state.write(rows.slots[self.state_group], torch.cat([keys, gates], dim=1))
        if not len(closing.tokens):
            return
        slots = rows.find(self.state_group, closing.tokens, closing.positions, closing.exists)
        entry = rms_norm(self._fold(state.read(slots), closing.exists), self.norm, self.eps)
        entries.write(rows.slots[self.entry_group][closing.tokens], rotate(entry, *turn))

    def _fold(self, state: Tensor, exists: Tensor) -> Tensor:
        """Entries [n, dim] of state rows [n, span, keys and gates]."""
        keys, gates = state.split(self.width, dim=2)
        if self.kind == "csa":
            keys, gates = self._halves(keys), self._halves(gates)
        gates = gates.masked_fill(~exists[..., None], -torch.inf)
        shares = torch.softmax(gates.transpose(1, 2).contiguous(), dim=2)
        return (shares * keys.transpose(1, 2)).sum(dim=2)

    def _halves(self, x: Tensor) -> Tensor:
        """Of [n, 2 windows, 2 dim]: the first half of the channels for the earlier window, the second for the later."""
        return torch.cat([x[:, : self.ratio, : self.dim], x[:, self.ratio :, self.dim :]], dim=1)

    def linears(self) -> list[Linear]:
        return [self.project]
