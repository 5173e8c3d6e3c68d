"""Measure the time of a step in the scheduler and KV manager, ours and vLLM's, on the same traces.

    python benchmarks/scheduler.py                       # ours alone: a plain model and DeepSeek V4
    python benchmarks/scheduler.py --vllm ENVIRONMENTS   # beside vLLM, in the folder that compare.py installs into

A step is one plan and one commit of its result; sampled tokens cost nothing. Both sides run one step at a time. Each
replay of a trace starts from an empty scheduler; replays of both sides take turns. vLLM hashes a prompt's blocks when
the request is created, ours when it is first planned, so the time to add requests is shown as well. The KV groups of
DeepSeek V4 should cost at most MODEL_GOAL times those of a plain model, in the longest step too: it matches a prompt.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from peers import install_vllm
from rounds import head, row
from scheduler_trace import VOCAB_SIZE, Replay, Trace, at_context, replay, steady, with_waiting

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.sched.scheduler import Scheduler
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendLimits, StepPlan, StepResult

GOAL = 0.5
"""Largest ratio of our time of a step to vLLM's."""
MODEL_GOAL = 1.5
"""Largest ratio of our time of a step with the groups of DeepSeek V4 to that with the one group of a plain model."""
CONTEXTS = (100, 1_000, 10_000, 100_000)
WAITING = (0, 100, 1_000, 10_000)
SAME_WORK = 0.01
"""Two sides did the same work if their numbers of sampled tokens differ by at most this share."""
SIDES = ("ours", "V4", "vLLM")
FAR_S = 1e9
PEER = Path(__file__).parent / "scheduler_vllm.py"

Side = Callable[[Trace], Replay]
Replays = Sequence[Replay]
"""One for each side."""


def blocks_of(trace: Trace, groups: Sequence[KVCacheGroupSpec]) -> tuple[int, ...]:
    """Return blocks for as many tokens as the trace says; of windows and states, of two prompts and all decodes."""
    num_tokens, longest = (trace.blocks - 1) * trace.block_size, trace.max_model_len
    first = max_live_blocks(groups, longest, trace.max_num_batched_tokens)
    more = max_live_blocks(groups, longest, 1)
    return tuple(
        1 + max(first[g], num_tokens // group.block_size)
        if group.keeps_history
        else 1 + 2 * first[g] + trace.max_num_seqs * more[g]
        for g, group in enumerate(groups)
    )


class Ours:
    """Our scheduler, and a worker that only counts. The model has `groups`, by default one group of full history."""

    def __init__(self, trace: Trace, groups: tuple[KVCacheGroupSpec, ...] = ()) -> None:
        groups = groups or plain_groups(trace.block_size)
        config = EngineConfig(
            model=ModelConfig(path="", dtype="bfloat16", vocab_size=VOCAB_SIZE),
            worker=WorkerConfig(backend="null"),
            cache=CacheConfig(groups=groups, num_blocks=blocks_of(trace, groups)),
            limits=BackendLimits(
                max_model_len=trace.max_model_len,
                max_num_seqs=trace.max_num_seqs,
                max_num_batched_tokens=trace.max_num_batched_tokens,
            ),
        )
        self._scheduler = Scheduler(config, KVCacheManager(config.cache.groups, config.cache.num_blocks))
        self._known = np.zeros(trace.max_num_seqs, np.int64)
        self._computed = np.zeros(trace.max_num_seqs, np.int64)
        self._now_s = 0.0

    def add(self, name: str, token_ids: list[int], output: int) -> float:
        """Add a request and return the seconds that it took. Every request has a deadline far in the future."""
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        packed = pack_ids(token_ids)
        start = time.perf_counter()
        self._scheduler.add(EngineRequest(request_id=name, token_ids=packed, params=params, deadline_s=FAR_S))
        return time.perf_counter() - start

    def step(self) -> tuple[float, int]:
        """Run plan and commit. Return the seconds that they took and the number of sampled tokens."""
        self._now_s += 0.01
        start = time.perf_counter()
        self._scheduler.begin_turn(self._now_s)
        plan = self._scheduler.plan(self._now_s)
        planned = time.perf_counter()
        assert plan is not None
        result = self._run(plan)
        resumed = time.perf_counter()
        self._scheduler.commit(result, self._now_s)
        return time.perf_counter() - resumed + planned - start, len(result.rows) // 4

    def _run(self, plan: StepPlan) -> StepResult:
        """Return a worker's result: each row whose last known token is computed samples one."""
        for new in plan.new_rows:
            self._known[new.row], self._computed[new.row] = len(new.token_ids) // 4, new.num_computed
        rows = unpack_ids(plan.rows)
        self._computed[rows] += unpack_ids(plan.num_tokens)
        rows = rows[self._computed[rows] == self._known[rows]]
        self._known[rows] += 1
        token_ids = np.full(len(rows), 7, np.int32)
        return StepResult(plan.step_id, 0, pack_ids(rows), pack_ids(token_ids), [], 0.0)


class VllmProcess:
    """vLLM's scheduler in a process of its own environment. It replays traces on request and is idle otherwise."""

    def __init__(self, root: Path) -> None:
        python, pipe = install_vllm(root).python, subprocess.PIPE
        self._process = subprocess.Popen([str(python), str(PEER)], stdin=pipe, stdout=pipe, text=True)

    def __call__(self, trace: Trace) -> Replay:
        """Replay a trace in that process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(trace.encode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's scheduler ended with status {self._process.wait()}; its message is above")
        return Replay(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def ours(trace: Trace) -> Replay:
    """Replay a trace in our scheduler."""
    return replay(trace, Ours(trace))


def ours_deepseek_v4(trace: Trace) -> Replay:
    """Replay a trace in our scheduler, with the groups of DeepSeek V4."""
    return replay(trace, Ours(trace, deepseek_v4_groups()))


def measure(trace: Trace, sides: Sequence[Side], rounds: int) -> list[Replay]:
    """Return medians over the rounds by side. The sides take turns."""
    seen: list[list[Replay]] = [[] for _ in sides]
    for _ in range(rounds):
        for replays, side in zip(seen, sides, strict=True):
            replays.append(side(trace))
    return [median(replays) for replays in seen]


def median(replays: Sequence[Replay]) -> Replay:
    """Return the median of each figure by itself."""
    columns = zip(*(astuple(one) for one in replays), strict=True)
    *times, tokens = (statistics.median(column) for column in columns)
    return Replay(*times, int(tokens))


def cells(trace: Trace, replays: Replays) -> list[str]:
    """Return microseconds per step of each side, then the ratios of DeepSeek V4 to plain and of plain to vLLM."""
    found = [trace.name]
    for one in replays:
        times = (one.step_us, one.median_step_us, one.add_us, one.longest_us)
        found += [f"{microseconds:.0f}" for microseconds in times]
    plain, deepseek_v4, *peer = replays
    ratios = deepseek_v4.step_us / plain.step_us, deepseek_v4.longest_us / plain.longest_us
    found += [f"{ratio:.2f}" for ratio in ratios]
    found.append("yes" if max(ratios) <= MODEL_GOAL else "no")
    for theirs in peer:
        with_add = (plain.step_us + plain.add_us) / (theirs.step_us + theirs.add_us)
        met = "yes" if plain.step_us <= GOAL * theirs.step_us else "no"
        found += [f"{plain.step_us / theirs.step_us:.2f}", f"{with_add:.2f}", met]
    for other in (deepseek_v4, *peer):
        if abs(plain.tokens - other.tokens) > SAME_WORK * plain.tokens:
            found[-1] += f" ({plain.tokens} and {other.tokens} tokens)"
    return found


def growth(traces: Sequence[Trace], seen: Sequence[Replays]) -> str:
    """Return the growth of our median step time over a series of traces. It should be 1."""
    first, last = (replays[0].median_step_us for replays in (seen[0], seen[-1]))
    return f"ours, {traces[-1].name} over {traces[0].name}: {last / first:.2f}"


def main(
    vllm: Annotated[Path | None, typer.Option(help="Folder of environments that compare.py made.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each trace and side; medians are shown.")] = 3,
) -> None:
    """Measure all traces, with the KV groups of a plain model and of DeepSeek V4, and print the table."""
    peer = VllmProcess(vllm.expanduser()) if vllm else None
    sides: list[Side] = [ours, ours_deepseek_v4, *([peer] if peer else [])]
    headings = [h for name in SIDES[: len(sides)] for h in (f"{name} mean", "median", "add", "longest")]
    headings += ["V4 / ours", "longest", f"at most {MODEL_GOAL}"]
    headings += ["ours / vLLM", "with add", f"at most {GOAL}"] if peer else []
    typer.echo(f"Microseconds per step\n\n{head('trace', *headings)}")
    growing = [list(map(at_context, CONTEXTS)), list(map(with_waiting, WAITING))]
    lines = []
    for traces in ([steady(64), steady(256)], *growing):
        seen = [measure(trace, sides, rounds) for trace in traces]
        for trace, replays in zip(traces, seen, strict=True):
            typer.echo(row(*cells(trace, replays)))
        if traces in growing:
            lines.append(growth(traces, seen))
    typer.echo("\n" + "\n".join(lines))
    if peer:
        peer.close()


if __name__ == "__main__":
    sys.exit(typer.run(main))
