"""What bounds the speed of a draft layer: the bytes of weights that steps and passes read.

    python benchmarks/speculation_limit.py AGREEING

A step that verifies K drafts reads what a step of one token reads, and the experts of K tokens more; a pass reads the
draft layer and the output layer. Where all drafts are right, K + 1 tokens come of one such step and K passes. On a
machine that waits for its memory, no more than the ratio of these bytes is to be had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.registry import load_config

DRAFT = "mtp."
OF_EVERY_TOKEN = ("enorm", "hnorm", "e_proj", "h_proj", "hc_attn", "attn_norm", "attn.wq_a", "attn.wkv", "attn.kv_norm")
"""Tensors of the draft layer that each token of a step reads, for its row of the KV cache."""


class Limit(NamedTuple):
    """Bytes that are read: by a step of one token without draft layer, by one that verifies, by a pass."""

    plain: float
    verifying: float
    drafting: float
    drafts: int

    @property
    def speed_up(self) -> float:
        """Return how many times as fast tokens come, if all drafts are right and reading takes all the time."""
        return (1 + self.drafts) * self.plain / (self.verifying + self.drafts * self.drafting)


def limit(model: DeepseekV4Config, drafts: int) -> Limit:
    """Count the bytes of a model with its draft layer, for this many drafts of one request."""
    inventory = DeepseekV4Inventory(model)
    sizes = inventory.packed_bytes()

    def read(names: list[str], tokens: int) -> float:
        """Bytes that a step of `tokens` reads: of the experts as many as it chooses, at random."""
        shares = {name: float(inventory.token_share(name)) for name in names}
        return sum(sizes[name] * (1 - (1 - share) ** tokens) for name, share in shares.items())

    main = [name for name in sizes if not name.startswith(DRAFT)]
    layer = [name for name in sizes if name.startswith(DRAFT)]
    rows = [name for name in layer if name.split(".", 2)[2].startswith(OF_EVERY_TOKEN)]
    verifying = read(main, 1 + drafts) + read(rows, 1 + drafts)
    return Limit(read(main, 1), verifying, read([*layer, "head.weight"], 1), drafts)


def table(model_dir: Path, most: int) -> str:
    """Return a table for 1 to `most` drafts."""
    _, model = load_config(model_dir, drafts=True)
    lines = [
        "| drafts | step without, MB | step that verifies, MB | passes, MB | speed-up at most |",
        "|---|---|---|---|---|",
    ]
    for drafts in range(1, 1 + most):
        found = limit(model, drafts)
        sizes = (found.plain, found.verifying, drafts * found.drafting)
        lines.append(f"| {drafts} | {' | '.join(f'{size / 1e6:.0f}' for size in sizes)} | {found.speed_up:.2f} |")
    return "\n".join(lines)


def main(
    model: Annotated[Path, typer.Argument(help="A DeepSeek V4 checkpoint with a draft layer.")],
    most: Annotated[int, typer.Option(help="Most drafts of a step.")] = 4,
) -> None:
    """Print the table."""
    typer.echo(table(model, most))


if __name__ == "__main__":
    typer.run(main)
