"""Compare our server with vLLM, llama.cpp and transformers on this machine, in one repeatable run.

    python benchmarks/compare.py                                         # everything, an hour or two
    python benchmarks/compare.py --peers vllm --only W1,W2 --rounds 1
    python benchmarks/compare.py --peers int4,llama-q4,vllm-gptq         # 4 bits, all made of the same checkpoint
    python benchmarks/compare.py --peers tp2,pp2,vllm-tp2                # two ranks beside one, and beside two of vLLM
    python benchmarks/compare.py --install-only
    python benchmarks/compare.py --report-only

Each peer is installed from package registries into a folder of its own; a second run installs nothing. Where pip finds
no CPU build of torch, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. A peer and our server,
at default options, run the workloads of workloads.py and P99 of compare_latency.py in turns. All processes of the
server not being measured are stopped. A run is repeated if other processes took more than 5 % of the machine. All
results go to runs/compare/compare.json, the source of the section in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import compare_latency
import compare_machine as machine
import compare_report as report
import typer
from compare_install import REPOSITORY, own_facts
from compare_peers import ALL, CPUS, FOUR_BITS, OURS, PEERS, RANKS, USUAL, Checkpoint, Ours, Peer
from compare_servers import PeerError, Server, running
from workloads import CONTROL_PLANE, WORKLOADS, Workload, measure

from pypto_serving.kernels import Engine
from pypto_serving.kernels.roofline import Memory

ATTEMPTS = 3
READ_BYTES = 256 << 20
CHECK = Workload("check", 2, 16, 8, 2)
PROMPTS = ("The", "A", "One", "In", "When", "Why", "To", "It")
"""Prompts for comparing the greedy answers of two servers."""
DOCUMENT, PICTURE = REPOSITORY / "docs" / "benchmarks.md", "compare.svg"
BY_NAME = {workload.name: workload for workload in (*WORKLOADS, CONTROL_PLANE)}


def say(text: str) -> None:
    """Print progress to stderr."""
    typer.echo(f"{datetime.now():%H:%M:%S} {text}", err=True)


@dataclass
class Reader:
    """Measures the machine's present read bandwidth."""

    def __post_init__(self) -> None:
        self._engine, self._memory = Engine("", CPUS), Memory(READ_BYTES)

    def bandwidth(self) -> float:
        """Measure the bandwidth in bytes per second."""
        return self._memory.bandwidth(self._engine)


class Session:
    """Owns the measurements of one peer and our server on one checkpoint."""

    def __init__(self, peer: Peer, ours: Ours, checkpoint: Checkpoint, out: Path) -> None:
        self.checkpoint = checkpoint
        self._peer, self._out, self._reader = peer, out, Reader()
        self._results = out / "clients"
        self._results.mkdir(exist_ok=True)
        self.ours = ours
        self.runs: list[dict[str, Any]] = []
        self.ready_s: dict[str, list[float]] = {OURS: [], peer.name: []}
        self.memory: dict[str, list[dict[str, int]]] = {OURS: [], peer.name: []}
        self.flags: dict[str, str] = {}
        self.token_bytes: dict[str, int] = {}
        self.agreement: str | None = None
        self._seed = int(time.time())

    def measure(self, workloads: Sequence[str], rounds: int) -> None:
        """Run all rounds. Restart our server for each, which takes seconds and keeps its memory comparable."""
        launches = {OURS: self.ours.launch(self.checkpoint), self._peer.name: self._peer.launch(self.checkpoint)}
        self.flags = {name: launch.flags for name, launch in launches.items()}
        self.token_bytes = {name: launch.token_bytes for name, launch in launches.items()}
        say(f"starting {self._peer.name}")
        with running(launches[self._peer.name], self._log(self._peer.name)) as theirs:
            self._started(self._peer.name, theirs)
            for number in range(rounds):
                with running(launches[OURS], self._log(OURS)) as mine:
                    self._started(OURS, mine)
                    if self.agreement is None:
                        self.agreement = agreement(mine, theirs)
                    self._round(number, workloads, {OURS: mine, self._peer.name: theirs})

    def _started(self, name: str, server: Server) -> None:
        """Check a new server, then stop it until it is measured."""
        self.ready_s[name].append(server.ready_s)
        say(f"{name} is ready after {server.ready_s:.1f} s")
        self._client(server, CHECK, self._next_seed())
        server.pause()

    def _round(self, number: int, workloads: Sequence[str], servers: dict[str, Server]) -> None:
        for workload in workloads:
            seed = self._next_seed()
            for name, server in servers.items():
                for attempt in range(ATTEMPTS):
                    run = self._run(server, workload, seed + attempt)
                    where = {"round": number, "workload": workload, "side": name, "attempt": attempt}
                    self.runs.append({**where, **run})
                    self._tell(self.runs[-1])
                    if run["load"]["foreign"] <= report.NOISY:
                        break
        for name, server in servers.items():
            server.resume()
            self.memory[name].append(server.memory())
            server.pause()

    def _run(self, server: Server, workload: str, seed: int) -> dict[str, Any]:
        """Run one workload on a server that is stopped before and after."""
        read_before = self._reader.bandwidth()
        server.resume()
        before = machine.sample(server.pid)
        result = self._client(server, BY_NAME.get(workload), seed)
        load = machine.Load.between(before, machine.sample(server.pid))
        server.pause()
        return {**result, "seed": seed, "load": asdict(load), "read_before": read_before,
                "read_after": self._reader.bandwidth()}  # fmt: skip

    def _client(self, server: Server, workload: Workload | None, seed: int) -> dict[str, Any]:
        """Run a client process, that of P99 without a workload. Raises PeerError if tokens are missing."""
        if not server.alive:
            raise PeerError(f"a server ended; see {server.log}")
        vocabulary = ["--vocab-size", str(self.checkpoint.vocab_size)]
        server.kv_tokens += compare_latency.TOKENS if workload is None else workload.tokens
        if workload is None:
            return self._latency(server, vocabulary, seed)
        prompts, options = None, vocabulary
        if server.launch.text:
            prompts, options = self._results / f"{workload.name}-{seed}.jsonl", ["--model", server.model()]
            prompts.write_text(self.checkpoint.texts(workload.prompt, workload.requests + 1, seed))
        result = measure(server.url, workload, seed, self._results, options, prompts)
        wanted = workload.requests * workload.output
        if result["total_output_tokens"] != wanted and not server.launch.text:
            raise PeerError(f"{workload.name}: {result['total_output_tokens']} output tokens instead of {wanted}")
        if result["median_itl_ms"] is None:
            raise PeerError(f"{workload.name}: the answers are not streamed")
        return result

    def _latency(self, server: Server, vocabulary: list[str], seed: int) -> dict[str, Any]:
        file = self._results / f"P99-{seed}.json"
        script = [sys.executable, str(Path(__file__).with_name("compare_latency.py")), server.url]
        command = [*script, *vocabulary, "--seed", str(seed), "--out", str(file)]
        if subprocess.run(command).returncode:
            raise PeerError(f"P99 failed; the message is above, the server's log is {server.log}")
        result: dict[str, Any] = json.loads(file.read_text())
        if result["failed"]:
            raise PeerError(f"P99: {result['errors'][0]}")
        return result

    def _tell(self, run: dict[str, Any]) -> None:
        values = ((metric, metric.of(run)) for metric in report.SHOWN[run["workload"]])
        shown = ", ".join(f"{metric.name} {value:.{metric.digits}f}" for metric, value in values if value is not None)
        foreign = f"foreign {run['load']['foreign']:.1%}"
        place = f"{self._peer.name} round {run['round'] + 1} {run['workload']}"
        say(f"{place} {run['side']:>12}: {shown}; {foreign}, read {run['read_before'] / 1e9:.0f} GB/s")

    def _log(self, name: str) -> Path:
        return self._out / f"{self._peer.name}-{self.checkpoint.folder.name}-{name}.log"

    def _next_seed(self) -> int:
        self._seed += 100
        return self._seed


def agreement(mine: Server, theirs: Server) -> str:
    """Return for how many prompts both greedy answers have the same first character."""
    same = 0
    for server in (mine, theirs):
        server.resume()
    for prompt in PROMPTS:
        first, second = (server.ask(prompt, 4) for server in (mine, theirs))
        same += first[:1] == second[:1]
    for server in (mine, theirs):
        server.pause()
    return f"{same} of {len(PROMPTS)}"


def about() -> dict[str, Any]:
    """Return facts about the machine and the state of this repository."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=REPOSITORY)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), os.uname().machine)
    return {"date": f"{datetime.now():%Y-%m-%d}", "cpu": cpu, "cpus": CPUS, "commit": commit.stdout.strip()}


def load(out: Path) -> dict[str, Any]:
    """Load earlier records."""
    file = out / "compare.json"
    return dict(json.loads(file.read_text())) if file.exists() else {"pairs": {}}


def add(record: dict[str, Any], peer: Peer, facts: dict[str, Any], session: Session) -> None:
    """Add a session to the record, replacing earlier runs of the same workloads. Costs are those of W1 to W5."""
    before = record["pairs"].get(peer.name, {"runs": [], "systems": {}})
    systems, measured = before["systems"], {run["workload"] for run in session.runs}
    if not session.checkpoint.small or not systems:
        for system, its in ((session.ours, own_facts()), (peer, facts)):
            systems[system.name] = {
                "title": system.title,
                "facts": its,
                "flags": session.flags[system.name],
                "ready_s": session.ready_s[system.name],
                "memory": session.memory[system.name],
                "token_bytes": session.token_bytes[system.name],
            }
        systems[peer.name]["agreement"] = session.agreement
    older = [run for run in before["runs"] if run["workload"] not in measured]
    record["pairs"][peer.name] = {"about": about(), "systems": systems, "runs": older + session.runs}


def write(out: Path, record: dict[str, Any], documented: bool) -> None:
    """Write compare.json and report.md, and the section of the documentation if `documented`."""
    (out / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
    section = report.markdown(record, PICTURE)
    (out / "report.md").write_text(section)
    folders = [out, *([DOCUMENT.parent] if documented else [])]
    for folder in folders:
        if not report.plot(folder / PICTURE, record):
            say("no plot: matplotlib is not installed")
    if documented:
        DOCUMENT.write_text(report.insert(DOCUMENT.read_text(), section))
    say(f"see {out / 'report.md'}{f' and {DOCUMENT}' if documented else ''}")


def checkpoint(given: Path | None, shape: str, root: Path) -> Checkpoint:
    """Return the given checkpoint, or make one of random weights beside the environments, once."""
    folder = given or root / "checkpoints" / shape
    if not (folder / "tokenizer_config.json").exists():
        if given:
            raise PeerError(f"{given} is no checkpoint: it has no tokenizer_config.json")
        say(f"making {folder}")
        script = Path(__file__).with_name("make_checkpoint.py")
        subprocess.run([sys.executable, str(script), shape, str(folder), "--force"], check=True)
    return Checkpoint(folder, small=shape == "tiny")


def compare(
    peer: Peer, root: Path, facts: dict[str, Any], checkpoint: Checkpoint, names: Sequence[str], rounds: int, out: Path
) -> None:
    """Run one session. Keep its measurements even if it ends early."""
    ours = peer.beside()
    ours.prepare(root, say)
    session = Session(peer, ours, checkpoint, out)
    try:
        session.measure(names, rounds)
    finally:
        if session.runs:
            record = load(out)
            add(record, peer, facts, session)
            write(out, record, documented=False)


def chosen(peers: str, int8: Path | None, int8_llmc: Path | None) -> list[Peer]:
    """Return the systems to measure."""
    found: list[Peer] = []
    for name in filter(None, peers.split(",")):
        if name not in PEERS:
            raise typer.BadParameter(f"there is no peer {name}; there are {', '.join(PEERS)}")
        found.append(PEERS[name]())
    for name, folder in (("int8", int8), ("int8-llmc", int8_llmc)):
        if folder:
            found.append(Ours(name, f"pypto-serving, {name}", folder, workloads=("W1", "W2")))
    return found


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint for W1 to W5 and P99; made if not given.")] = None,
    tiny: Annotated[Path | None, typer.Option(help="Checkpoint for T1; made if not given.")] = None,
    int8: Annotated[Path | None, typer.Option(help="The checkpoint in int8, as another system.")] = None,
    int8_llmc: Annotated[Path | None, typer.Option(help="The int8 checkpoint as llm-compressor writes it.")] = None,
    peers: Annotated[
        str, typer.Option(help=f"Peers, comma-separated; others are vllm-zen, {', '.join(FOUR_BITS + RANKS)}.")
    ] = ",".join(USUAL),
    only: Annotated[str, typer.Option(help="Workloads, comma-separated.")] = ",".join(ALL),
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each workload and system.")] = 5,
    environments: Annotated[Path, typer.Option(help="Folder to install peers into.")] = Path("~/.cache/pypto-peers"),
    out: Annotated[Path, typer.Option(help="Folder of records, logs and report.")] = Path("runs/compare"),
    install_only: Annotated[bool, typer.Option("--install-only", help="Install the peers and stop.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Write the report from the records.")] = False,
) -> None:
    """Install, measure and report. Only complete runs and --report-only write into docs/benchmarks.md."""
    out.mkdir(parents=True, exist_ok=True)
    wanted, root = only.split(","), environments.expanduser().resolve()
    if unknown := set(wanted) - set(ALL):
        raise typer.BadParameter(f"there is no workload {min(unknown)}; there are {', '.join(ALL)}")
    for peer in [] if report_only else chosen(peers, int8, int8_llmc):
        facts = peer.prepare(root, say)
        for given, shape in () if install_only else ((model, "0.6b"), (tiny, "tiny")):
            small = shape == "tiny"
            names = [name for name in peer.workloads if name in wanted and (name == CONTROL_PLANE.name) == small]
            if names:
                compare(peer, root, facts, checkpoint(given, shape, root), names, rounds, out)
    complete = set(wanted) == set(ALL) and set(peers.split(",")) >= set(USUAL)
    if report_only or (complete and not install_only):
        write(out, load(out), documented=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        typer.run(main)
    except PeerError as error:
        sys.exit(f"error: {error}")
