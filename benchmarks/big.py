"""Load and serve big shapes on a small machine, one after the other, as random checkpoints made in their format.

    python benchmarks/big.py --out runs/big                                  # 14B in int8 and int4, 30B-A3B in int4
    python benchmarks/big.py --out runs/big --only 30b-a3b-w4a16 --llama     # and llama.cpp in Q4_0 on the same weights

Tells the seconds from the command to the first answer beside those of reading the files from disk, the peak of resident
memory, and W1: tokens a second, and the share of the read bandwidth that weights take. Checkpoints are made beside the
peers of compare.py, and need 9 to 18 GB each; --forget deletes each when it has been measured.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import compare_install as install
import compare_machine as machine
import typer
from compare import Reader, say
from compare_peers import CPUS, LLAMA, TRANSFORMERS, Checkpoint, Ours
from compare_servers import Launch, PeerError, running
from workloads import WORKLOADS, measure

CASES = {
    "14b-w8a8": ("14b", "w8a8", 0),
    "14b-w4a16": ("14b", "w4a16", 128),
    "30b-a3b-w4a16": ("30b-a3b", "w4a16", 32),
}
W1 = WORKLOADS[0]
START_ROOM_S = 10
GIB = 1 << 30
PIECE = 16 << 20


def make(name: str, root: Path) -> Path:
    """Return the folder of a case's checkpoint, made if it is missing."""
    shape, format, group_size = CASES[name]
    folder = root / "checkpoints" / name
    if not (folder / "tokenizer_config.json").exists():
        say(f"making {folder}")
        script = [sys.executable, str(Path(__file__).with_name("make_checkpoint.py")), shape, str(folder)]
        subprocess.run([*script, "--format", format, "--group-size", str(group_size or 32), "--force"], check=True)
    return folder


def forget_pages(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_seconds(files: list[Path]) -> float:
    """Read the files from disk and return the seconds."""
    forget_pages(files)
    buffer, began = bytearray(PIECE), time.monotonic()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.monotonic() - began


def serve(launch: Launch, vocab_size: int, files: list[Path], rounds: int, out: Path, name: str) -> dict[str, Any]:
    """Start a server that reads `files` from disk, measure W1, and return the record."""
    reader, reading_s = Reader(), read_seconds(files)
    forget_pages(files)
    runs = []
    with running(launch, out / f"{name}.log") as server:
        peak = machine.memory(server.pid).peak
        say(f"{name} is ready after {server.ready_s:.1f} s; reading its files takes {reading_s:.1f} s")
        for number in range(rounds):
            before = reader.bandwidth()
            run = measure(server.url, W1, int(time.time()) + number, out, ["--vocab-size", str(vocab_size)])
            runs.append({**run, "bandwidth": (before + reader.bandwidth()) / 2})
        served = machine.memory(server.pid)
    bytes_read = sum(file.stat().st_size for file in files)
    return {
        "name": name,
        "file_bytes": bytes_read,
        "token_bytes": launch.token_bytes,
        "reading_s": reading_s,
        "ready_s": server.ready_s,
        "peak_at_start": peak,
        "peak": served.peak,
        "rates": [run["output_throughput"] for run in runs],
        "itls_ms": [run["median_itl_ms"] for run in runs],
        "bandwidths": [run["bandwidth"] for run in runs],
    }


def row(record: dict[str, Any]) -> str:
    """Return a record as a line of a Markdown table."""
    in_time = record["ready_s"] <= record["reading_s"] + START_ROOM_S
    times = zip(record["itls_ms"], record["bandwidths"], strict=True)
    shares = [record["token_bytes"] * 1e3 / itl / bandwidth for itl, bandwidth in times]
    share = f"{statistics.median(shares):.0%}" if record["token_bytes"] else ""
    cells = [
        record["name"],
        f"{record['file_bytes'] / 1e9:.1f}",
        f"{record['reading_s']:.1f}",
        f"{record['ready_s']:.1f}{'' if in_time else ' (late)'}",
        f"{record['peak_at_start'] / GIB:.1f}",
        f"{record['peak'] / GIB:.1f}",
        f"{record['token_bytes'] / 1e9:.2f}" if record["token_bytes"] else "",
        f"{statistics.median(record['rates']):.1f}",
        f"{statistics.median(record['itls_ms']):.1f}",
        f"{statistics.median(record['bandwidths']) / 1e9:.0f}",
        share,
    ]
    return f"| {' | '.join(cells)} |"


def llama_launch(folder: Path, root: Path) -> tuple[Launch, list[Path]]:
    """Return llama-server on the same weights, rounded to Q4_0, and its file."""
    env, reader = install.llama(root, say, LLAMA), install.transformers(root, say, TRANSFORMERS)
    file = install.gguf(folder, folder.name, env, LLAMA, reader, say, q4=True)
    program, options = env.folder / "build" / "bin" / "llama-server", f"-t {CPUS} -tb {CPUS} -c 4096 -np 1"
    words = [str(program), "-m", str(file), *options.split()]
    return Launch(lambda port: [*words, "--port", str(port)], options), [file]


HEAD = """\
| weights | file GB | reading s | ready s | peak RSS GiB: start | W1 | GB a token | tok/s | ITL ms | GB/s | share |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main(
    out: Annotated[Path, typer.Option(help="Folder for logs, records and the table.")],
    only: Annotated[str, typer.Option(help="Cases, comma-separated.")] = ",".join(CASES),
    rounds: Annotated[int, typer.Option(min=1, help="Runs of W1.")] = 3,
    llama: Annotated[bool, typer.Option("--llama", help="Measure llama.cpp on 4-bit cases too.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete each checkpoint when it has been measured.")] = False,
    environments: Annotated[Path, typer.Option(help="Folder of peers and checkpoints.")] = Path("~/.cache/pypto-peers"),
) -> None:
    """Measure each case and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    root, records = environments.expanduser().resolve(), []
    for name in only.split(","):
        if name not in CASES:
            raise typer.BadParameter(f"there is no case {name}; there are {', '.join(CASES)}")
        folder = make(name, root)
        checkpoint, ours = Checkpoint(folder), Ours()
        launches = [(name, ours.launch(checkpoint), sorted(folder.glob("*.safetensors")))]
        if llama and "w4" in name:
            launches.append((f"{name}, llama.cpp", *llama_launch(folder, root)))
        for title, launch, files in launches:
            records.append(serve(launch, checkpoint.vocab_size, files, rounds, out, title))
            (out / "big.json").write_text(json.dumps(records, indent=1) + "\n")
        if forget:
            shutil.rmtree(folder)
            for file in (root / "gguf").glob(f"{name}.gguf"):
                file.unlink()
    table = "\n".join([HEAD, *map(row, records)])
    (out / "big.md").write_text(f"{table}\n")
    typer.echo(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except PeerError as error:
        sys.exit(f"error: {error}")
