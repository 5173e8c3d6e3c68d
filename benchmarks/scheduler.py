"""Measure the time of a step in the scheduler and KV manager, ours and vLLM's, on the same traces.

    python benchmarks/scheduler.py                       # ours alone: a plain model and DeepSeek V4
    python benchmarks/scheduler.py --vllm ENVIRONMENTS   # beside vLLM, in the folder that compare.py installs into

A step is one plan and one commit of its result; sampled tokens cost nothing. Both sides run one step at a time. Each
replay of a trace starts from an empty scheduler; replays of both sides take turns. vLLM hashes a prompt's blocks when
the request is created, ours when it is first planned, so the time to add requests is shown as well. The KV groups of
DeepSeek V4 are measured beside those of a plain model, in the longest step too: it matches a prompt.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from peers import install_vllm
from rounds import head, row
from scheduler_trace import VOCAB_SIZE, Replay, Trace, at_context, replay, steady, with_waiting

from pypto_serving.bench.simulator import Machine, VirtualWorker
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.sched.scheduler import Scheduler
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendLimits

CONTEXTS = (100, 1_000, 10_000, 100_000)
WAITING = (0, 100, 1_000, 10_000)
SIDES = ("ours", "V4", "vLLM")
FAR_S = 1e9
V4_GROUPS = deepseek_v4_groups()
PEER = Path(__file__).parent / "scheduler_vllm.py"

Side = Callable[[Trace], Replay]


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
        machine = Machine(block_size=1, device_tokens=1, max_num_seqs=trace.max_num_seqs)
        self._worker = VirtualWorker(machine)
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
        result = self._worker.run(plan)
        resumed = time.perf_counter()
        self._scheduler.commit(result, self._now_s)
        return time.perf_counter() - resumed + planned - start, len(result.rows) // 4


class VllmProcess:
    """vLLM's scheduler in a process of its own environment. It replays traces on request and is idle otherwise."""

    def __init__(self, root: Path) -> None:
        python, pipe = install_vllm(root).python, subprocess.PIPE
        self._process = subprocess.Popen([str(python), str(PEER)], stdin=pipe, stdout=pipe, text=True)

    def __call__(self, trace: Trace) -> Replay:
        """Replay a trace in that process."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.json.encode(trace).decode() + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's scheduler ended with status {self._process.wait()}; its message is above")
        return msgspec.json.decode(line, type=Replay)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


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


def cells(trace: Trace, replays: Sequence[Replay]) -> list[str]:
    """Return microseconds per step of each side, then the ratios of DeepSeek V4 to plain and of plain to vLLM.

    A side that sampled another number of tokens did other work; both numbers are shown.
    """
    found = [trace.name]
    for one in replays:
        found += [f"{value:.0f}" for value in (one.step_us, one.median_step_us, one.add_us, one.longest_us)]
    plain, deepseek_v4, *peer = replays
    found += [f"{deepseek_v4.step_us / plain.step_us:.2f}", f"{deepseek_v4.longest_us / plain.longest_us:.2f}"]
    for theirs in peer:
        with_add = (plain.step_us + plain.add_us) / (theirs.step_us + theirs.add_us)
        found += [f"{plain.step_us / theirs.step_us:.2f}", f"{with_add:.2f}"]
    if len(counts := {one.tokens for one in replays}) > 1:
        found[0] += f" ({' and '.join(map(str, sorted(counts)))} tokens)"
    return found


def main(
    vllm: Annotated[Path | None, typer.Option(help="Folder of environments that compare.py made.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Replays of each trace and side; medians are shown.")] = 3,
) -> None:
    """Measure all traces, with the KV groups of a plain model and of DeepSeek V4, and print the table."""
    peer = VllmProcess(vllm.expanduser()) if vllm else None
    plain, deepseek_v4 = (lambda trace, groups=groups: replay(trace, Ours(trace, groups)) for groups in ((), V4_GROUPS))
    sides: list[Side] = [plain, deepseek_v4, *([peer] if peer else [])]
    headings = [h for name in SIDES[: len(sides)] for h in (f"{name} mean", "median", "add", "longest")]
    headings += ["V4 / ours", "longest", *(["ours / vLLM", "with add"] if peer else [])]
    typer.echo(f"Microseconds per step\n\n{head('trace', *headings)}")
    for trace in (steady(64), steady(256), *map(at_context, CONTEXTS), *map(with_waiting, WAITING)):
        typer.echo(row(*cells(trace, measure(trace, sides, rounds))))
    if peer:
        peer.close()


if __name__ == "__main__":
    sys.exit(typer.run(main))
