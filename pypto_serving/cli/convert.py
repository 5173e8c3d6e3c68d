"""`convert`: write a checkpoint in another format."""

from __future__ import annotations

from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pypto_serving.errors import ConfigError
from pypto_serving.util import format_size

if TYPE_CHECKING:
    from pypto_serving.model.convert.rounding import Encoding

_GROUP_SIZES = (32, 64, 128)


class Format(StrEnum):
    """Formats that can be written."""

    W8A8 = "w8a8"
    W4A16 = "w4a16"
    MXFP4 = "mxfp4"


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub name of a checkpoint, or bundled.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write; made if missing.")],
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="w8a8: int8 weights and activations in linear layers, half the bytes of bf16. "
            "w4a16: int4 weights, a bit more than a quarter. mxfp4: 4-bit floats, a quarter.",
        ),
    ],
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Inputs that share a scale in w4a16: 32 (default), 64 or 128."),
    ] = None,
) -> None:
    """Write a checkpoint of bf16, float16, float32, FP8 or 4-bit floats in another format.

    After an interruption, run the same command again.
    """
    from pypto_serving.cli.progress import LoadProgress
    from pypto_serving.model.convert.conversion import convert as convert_checkpoint
    from pypto_serving.setup.locate import locate_model

    encoding = _encoding(format, group_size)
    if not str(target).isprintable():
        raise ConfigError(f"TARGET is {str(target)!r}, but must be text on one line")
    try:
        with closing(LoadProgress()) as progress:
            folder = locate_model(source)
            wanted = target.expanduser()
            convert_checkpoint(folder, wanted, encoding, lambda phase, *done: progress(f"converting {phase}", *done))
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on, and keeps the files that are complete", err=True)
        raise
    before, after = (sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (folder, wanted))
    sizes = f"{format_size(before)} of weights became {format_size(after)}"
    typer.echo(f"{sizes}; {target} is complete; serve it with `pypto-serving serve {target}`")


def _encoding(format: Format, group_size: int | None) -> Encoding:
    """Return the encoding that options name; raises ConfigError."""
    from pypto_serving.model.convert.rounding import mxfp4, w4a16, w8a8

    if format != Format.W4A16:
        if group_size is not None:
            raise ConfigError(f"--group-size is {group_size}, but only w4a16 lets it be chosen; drop it")
        return w8a8() if format == Format.W8A8 else mxfp4()
    if group_size not in (None, *_GROUP_SIZES):
        raise ConfigError(f"--group-size is {group_size}, but must be 32, 64 or 128")
    return w4a16(group_size or _GROUP_SIZES[0])
