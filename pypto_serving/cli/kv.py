"""`kv`: show, verify and clear the folder of the disk tier."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.errors import EXIT_CRASH, EXIT_OK, ConfigError, PyptoError

if TYPE_CHECKING:
    from pypto_serving.store.inspect import FolderFacts

kv_app = typer.Typer(help="Manage the folder of --kv-disk.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that --kv-disk names.", readable=False)]
"""`readable` is off, so that unreadable folders get our own error message."""


@kv_app.command()
def stat(
    folder: Folder,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the parts of DIR, one for each model and version, with their groups."""
    import msgspec

    from pypto_serving.cli.report import columns, echo
    from pypto_serving.util import format_size

    found = _facts(folder)
    if json:
        typer.echo(msgspec.json.encode({"folders": [_as_dict(one) for one in found]}))
    elif not found:
        typer.echo(f"{folder} holds no blocks")
    else:
        head = ("part", "model", "kept as", "in use", "last used", "group", "bytes/block", "blocks", "free")
        echo(columns([head, *(row for one in found for row in _rows(one))]))
        echo([f"{format_size(sum(one.usage.num_bytes for one in found))} on disk"])
        echo(f"{one.usage.path.name} is unusable: {one.problem}" for one in found if one.problem)


def _facts(folder: Path) -> list[FolderFacts]:
    """Read the facts about all parts; skip parts that are deleted meanwhile."""
    from pypto_serving.store.inspect import facts, folders_in

    found = []
    for path in folders_in(folder.expanduser()):
        try:
            with _one_line_errors(path):
                found.append(facts(path))
        except FileNotFoundError:
            continue
    return found


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a one-line error, but let FileNotFoundError through."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PyptoError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _rows(one: FolderFacts) -> list[tuple[str, ...]]:
    used_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.usage.used_at_s))
    model, kind = (one.meta.model or "-", one.meta.kind) if one.meta else ("-", "-")
    first = (one.usage.path.name, model, kind, "yes" if one.usage.in_use else "no", used_at)
    rows = [
        (
            str(number),
            str(group.block_bytes),
            str(group.num_blocks),
            "-" if group.num_free is None else str(group.num_free),
        )
        for number, group in enumerate(one.groups)
    ]
    return [(*(first if i == 0 else ("",) * len(first)), *row) for i, row in enumerate(rows or [("-",) * 4])]


def _as_dict(one: FolderFacts) -> dict[str, Any]:
    return {
        "name": one.usage.path.name,
        "model": one.meta.model if one.meta else None,
        "fingerprint": one.meta.fingerprint if one.meta else None,
        "kind": one.meta.kind if one.meta else None,
        "num_bytes": one.usage.num_bytes,
        "in_use": one.usage.in_use,
        "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.usage.used_at_s)),
        "problem": one.problem,
        "groups": [
            {"block_bytes": group.block_bytes, "num_blocks": group.num_blocks, "num_free": group.num_free}
            for group in one.groups
        ],
    }


@kv_app.command()
def verify(folder: Folder) -> int:
    """Read and check all blocks in DIR. Drop damaged ones unless a server uses them; exit with 1 if there are any."""
    from pypto_serving.cli.progress import LoadProgress
    from pypto_serving.store.folder import Unusable
    from pypto_serving.store.inspect import folders_in
    from pypto_serving.store.inspect import verify as verify_folder
    from pypto_serving.util import counted

    code = EXIT_OK
    found = folders_in(folder.expanduser())
    if not found:
        typer.echo(f"{folder} holds no blocks")
    for path in found:
        progress = LoadProgress()
        try:
            with _one_line_errors(path):
                checked = verify_folder(path, partial(progress, f"reading {path.name}"))
        except Unusable as error:
            typer.echo(f"{path.name} is skipped: {error}")
            continue
        except FileNotFoundError:
            continue  # deleted meanwhile
        finally:
            progress.close()
        line = f"{path.name}: {counted(checked.num_blocks, 'block')}, {checked.num_damaged} damaged"
        if checked.num_damaged:
            code = EXIT_CRASH
            line += ", dropped" if checked.dropped else "; a server uses this part and drops them when it reads them"
        typer.echo(line)
    return code


@kv_app.command()
def clear(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Delete all blocks in DIR that no server uses. Ask first; exit with 1 if the answer is no."""
    from pypto_serving.store.folder import delete
    from pypto_serving.util import counted, format_size

    found = _facts(folder)
    unused = [one.usage for one in found if not one.usage.in_use]
    in_use = len(found) - len(unused)
    if in_use:
        typer.echo(f"in use by a server, and kept: {in_use} of {counted(len(found), 'part')}")
    if not unused:
        typer.echo("nothing to delete")
        return EXIT_OK
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("stdin is not a terminal, so nobody can confirm; give --yes to delete without asking")
        size = format_size(sum(one.num_bytes for one in unused))
        if not typer.confirm(f"Delete {size} in {counted(len(unused), 'part')} of {folder}?"):
            typer.echo("nothing was deleted")
            return EXIT_CRASH
    deleted = 0
    for one in unused:
        with suppress(FileNotFoundError), _one_line_errors(one.path):  # deleted meanwhile
            deleted += one.num_bytes if delete(one.path) else 0
    typer.echo(f"deleted {format_size(deleted)}")
    return EXIT_OK
