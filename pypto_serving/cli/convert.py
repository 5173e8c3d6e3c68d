"""`convert`: write a checkpoint in another format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


class Format(StrEnum):
    """Formats that can be written."""

    W8A8 = "w8a8"


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder with a checkpoint, or a hub name.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; made if missing.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format", help="w8a8: int8 weights and activations in linear layers, in half the bytes of bf16."
        ),
    ],
) -> None:
    """Write a checkpoint of bf16, f16 or f32 in another format. After an interruption, run the same command again."""
    from pypto_serving.cli.progress import LoadProgress
    from pypto_serving.model.qwen3.convert import convert_to_w8a8
    from pypto_serving.setup.locate import locate_model

    progress = LoadProgress()
    try:
        folder = locate_model(source)
        convert_to_w8a8(folder, target.expanduser(), lambda phase, *done: progress(f"converting {phase}", *done))
    finally:
        progress.close()
    typer.echo(f"{target} is complete; serve it with `pypto-serving serve {target}`")
