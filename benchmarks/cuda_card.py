"""Check and measure `--backend cuda` on a machine with a card, torch and Triton, in at most six minutes.

    python benchmarks/cuda_card.py --out DIR                                # all parts
    python benchmarks/cuda_card.py --out DIR --only checkpoints,limits,serve-8b --option=--kv-memory --option=30GiB
    python benchmarks/cuda_card.py --out DIR --dry                          # no card: tiny shapes on the CPU

| part         | what it does                                                                                  |
|--------------|-----------------------------------------------------------------------------------------------|
| self-tests   | run the tests of the kernels on the card                                                      |
| checkpoints  | write random weights in the shapes of Qwen3-0.6B and Qwen3-8B                                 |
| compile      | compile what `kernels` measures, in several processes                                         |
| limits       | measure bandwidth, the largest product, a node of a graph, and pinned copies                  |
| serve-0.6b   | start a server: a chat, the same answers in any company and after a SIGKILL, W1 to W5, T1     |
| serve-8b     | the same without a SIGKILL                                                                    |
| transformers | time `generate` of transformers, and compare its greedy tokens with the server's              |
| kernels      | time kernels with the settings of `cuda_kernels.CANDIDATES`                                   |

The first three run at the same time, all others alone. Each part is a process with a time limit of its own, so that
none can end or delay another; its figures are in DIR/PART.json, its messages in DIR/PART.log. This module is not called
`cuda`, since that is the name of NVIDIA's own package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import psutil
import typer
from make_checkpoint import SHAPES, make_config, write_qwen
from rounds import head, row
from servers import PROGRAM, Request, ask_all, elapsed_s, served

from pypto_serving.model.decoder.inventory import EMBEDDING, DecoderInventory
from pypto_serving.model.families import qwen3

REPOSITORY = Path(__file__).parents[1]
TESTS = "tests/kernels/cuda"
SAMPLER_TESTS = ("tests/backend/cuda/test_sampler.py", "tests/backend/cuda/test_adjustments.py")
IDS = range(300, 4000)
"""Token ids that every tested vocabulary holds."""
LOADS = {"W1": (1, 128, 128), "W2": (8, 128, 128), "W3": (32, 128, 64), "W4": (64, 128, 128), "W5": (256, 128, 128)}
"""Requests at once, prompt and output tokens."""
PROMPTS = (8, 4096)
"""Of T1: prompts at once, and their tokens."""
FIRST = 16
"""Output tokens of the shorter of two runs whose difference is the time of decoding."""
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200, 300, 511, 513, 700, 1025, 1600, 2050, 3000, 5000)
CUTS, BATCH, LONG, ALIKE = (32, 100, 512, 1000, 2048), 200, 400, 8
"""Prefixes to cache first; requests of a batch; tokens of an answer during which a worker dies; prompts for a peer."""
FIELDS: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "logprobs": 5, "return_token_ids": True, "top_p": 0.95}

Body = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What all parts know. `models` is the folder of checkpoints; sizes are divided by `scale`."""

    out: Path
    models: Path
    dry: bool
    backend: str
    options: tuple[str, ...]

    @property
    def scale(self) -> int:
        return 16 if self.dry else 1

    def shape(self, name: str) -> str:
        return "tiny" if self.dry else name

    def save(self, part: str, figures: dict[str, Any]) -> None:
        """Add figures to those of a part."""
        (self.out / f"{part}.json").write_text(json.dumps(self.figures(part) | figures, indent=1))

    def figures(self, part: str) -> dict[str, Any]:
        """Return the figures of a part so far."""
        file = self.out / f"{part}.json"
        return json.loads(file.read_text()) if file.exists() else {}


def self_tests(run: Run) -> None:
    """Run the tests of kernels; print the end of their output."""
    command = [sys.executable, "-m", "pytest", "-rf", "--tb=line", "-p", "no:cacheprovider", TESTS, *SAMPLER_TESTS]
    command += ["--ignore", f"{TESTS}/test_compiling.py", *(["--collect-only"] if run.dry else ["-n", "6"])]
    environment = os.environ | {"TRITON_INTERPRET": str(int(run.dry))}
    code = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=sys.stderr).returncode
    print(*(run.out / "self-tests.log").read_text().splitlines()[-6:], sep="\n")
    run.save("self-tests", {"code": code})


def checkpoints(run: Run) -> None:
    """Write the checkpoints with weights that the card draws."""
    from cuda_kernels import normal

    for shape in ("0.6b", "8b"):
        start_s, folder = time.perf_counter(), run.models / shape
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_qwen(folder, run.shape(shape), draw=normal)
        print(f"{shape} in {time.perf_counter() - start_s:.1f} s", flush=True)


def serve(run: Run, shape: str) -> None:
    """Start a server and ask it."""
    command = [*PROGRAM, "serve", str(run.models / shape), "--backend", run.backend, *run.options]
    with served(command, log=sys.stderr) as ready:
        url = ready["url"]
        chat = {"messages": [{"role": "user", "content": "What is 7 times 6?"}], "max_tokens": 12}
        reply = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).raise_for_status().json()
        said = reply["choices"][0]["message"]["content"]
        print(f"ready after {ready['ready_s']:.1f} s; a chat: {said!r}", flush=True)
        asks = [lambda: law(url, run.scale), lambda: speeds(url, run, shape)]
        asks += [lambda: survive(url, ready["pid"])] if shape == "0.6b" else []
        for ask in asks:
            try:
                run.save(f"serve-{shape}", ask())
            except Exception as error:  # the others may succeed
                print(f"FAILED: {error!r}", flush=True)


def answers(url: str, bodies: Sequence[Body], at_once: int = 1000) -> list[Body]:
    """Send completions, at most `at_once` at a time; return the token ids and log-probabilities of each."""

    async def main() -> list[Body]:
        slots, limits = asyncio.Semaphore(at_once), httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

            async def ask(body: Body) -> Body:
                async with slots:
                    reply = await client.post("/v1/completions", json=body)
                choice = reply.raise_for_status().json()["choices"][0]
                return {key: choice[key] for key in ("token_ids", "logprobs")}

            return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(main())


COMPARED = "the same requests", "answers", "equal in all bits", "first difference"


def compare(name: str, wanted: Sequence[Body], found: Sequence[Body]) -> list[Any]:
    """Print a line of a table, and return it: how many answers are equal, and what differs in the first that is not."""
    differ = [(i, one, other) for i, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other]
    where = ""
    for i, one, other in differ[:1]:
        alike = common_start(one["token_ids"], other["token_ids"])
        where = f"request {i}, " + (f"token {alike}" if alike < len(one["token_ids"]) else "log-probabilities")
    line = [name, len(wanted), len(wanted) - len(differ), where]
    print(row(*line), flush=True)
    return line


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are alike before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def law(url: str, scale: int) -> dict[str, Any]:
    """Ask the same greedy and sampled requests alone and in company; print how many answers are equal in all bits."""
    rng = random.Random(5)

    def prompt(length: int) -> list[int]:
        return rng.choices(IDS, k=-(-length // scale))

    bodies: list[Body] = [FIELDS | {"prompt": prompt(128), "temperature": 0} for _ in range(ALIKE)]
    bodies += [FIELDS | {"prompt": prompt(n), "temperature": i % 2 * 0.9, "seed": i} for i, n in enumerate(LENGTHS)]
    others = [FIELDS | {"prompt": prompt(rng.randrange(1, 600))} for _ in range(max(9, BATCH // scale - len(bodies)))]
    longer = [FIELDS | {"prompt": prompt(4000), "max_tokens": 1} for _ in range(6)]
    alone = answers(url, bodies, 1)
    tokens = [token for answer in alone for token in answer["token_ids"]]
    print(f"{len(alone)} answers alone have {len(set(tokens))} different tokens of {len(tokens)}\n{head(*COMPARED)}")
    rows = [compare("alone, from the cache", alone, answers(url, bodies, 1))]
    for name, company in ((f"in a batch of {len(others) + len(bodies)}", others), ("beside long prompts", longer)):
        again = [body | {"cache_salt": name} for body in bodies]
        rows.append(compare(name, alone, answers(url, [*company, *again])[len(company) :]))
    for cut in (each // scale for each in CUTS):
        chosen = [i for i, body in enumerate(bodies) if len(body["prompt"]) > cut]
        again = [bodies[i] | {"cache_salt": f"{cut}"} for i in chosen]
        answers(url, [body | {"prompt": body["prompt"][:cut], "max_tokens": 1} for body in again])
        rows.append(compare(f"after a prefix of {cut} tokens", [alone[i] for i in chosen], answers(url, again)))
    greedy = [[body["prompt"], answer["token_ids"]] for body, answer in zip(bodies[:ALIKE], alone, strict=False)]
    return {"law": rows, "greedy": greedy}


def survive(url: str, pid: int) -> dict[str, Any]:
    """Kill the worker while it computes long answers; compare them with answers that were not disturbed."""
    rng = random.Random(6)
    bodies = [FIELDS | {"prompt": rng.choices(IDS, k=50), "temperature": i % 2 * 0.9, "seed": i} for i in range(8)]
    bodies = [body | {"max_tokens": LONG} for body in bodies]
    print(head(*COMPARED))
    wanted, start_s = answers(url, bodies), time.perf_counter()
    rows = [compare("8 long answers, again", wanted, answers(url, bodies))]
    took_s = time.perf_counter() - start_s
    family = psutil.Process(pid).children(recursive=True)
    worker = next(each for each in family if any(word.endswith("worker") for word in each.cmdline()))
    threading.Timer(took_s * 0.4, worker.kill).start()
    rows.append(compare("over a SIGKILL of the worker", wanted, answers(url, bodies)))
    lost = "killed" if not worker.is_running() else "NOT killed"
    print(f"worker {lost}, {time.perf_counter() - start_s - 2 * took_s:.1f} s more", flush=True)
    return {"kill": rows}


def work_of(shape: str) -> tuple[int, int, int]:
    """Return bytes of weights that a step reads, bytes of KV a token, and operations of all layers a token."""
    config = make_config(SHAPES[shape], 0)
    shapes = DecoderInventory(qwen3.parse(config, "config.json")).weights()
    sizes = {name: math.prod(each) for name, each in shapes.items()}
    read = sum(sizes.values()) - (0 if config["tie_word_embeddings"] else sizes[EMBEDDING])
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * read, 2 * kv, 2 * sum(size for name, size in sizes.items() if ".layers." in name)


def speeds(url: str, run: Run, shape: str) -> dict[str, Any]:
    """Measure all loads, beside the byte floor: the time that reading weights and KV takes at the card's bandwidth."""
    rng, limits, rows = random.Random(7), run.figures("limits"), []
    bandwidth, peak = limits.get("read_bytes_per_s", math.nan), limits.get("product_flops", math.nan)
    heads = "load", "at once", "streamed tok/s", "TTFT ms", "decode tok/s", "step ms", "floor ms", "of the floor"
    print(head(*heads))
    weights, token_kv, token_flops = work_of(run.shape(shape))
    for name, sizes in LOADS.items():
        count, prompt, output = (max(1, size // run.scale) for size in sizes)

        def send(tokens: int, stream: bool, count: int = count, prompt: int = prompt) -> Any:
            return ask_all(url, [Request(rng.choices(IDS, k=prompt), tokens) for _ in range(count)], stream=stream)

        send(4, False)
        streamed = send(output, True)
        lengths = FIRST, FIRST + output
        short_s, long_s = (min(elapsed_s(send(length, False)) for _ in range(2)) for length in lengths)
        step_s = max(long_s - short_s, 1e-9) / output
        floor_s = (weights + count * (prompt + FIRST + output / 2) * token_kv) / bandwidth
        user = count * output / elapsed_s(streamed)
        first_ms = 1e3 * statistics.median(record.ttft_s or 0.0 for record in streamed)
        figures = [f"{user:.0f}", f"{first_ms:.0f}", f"{count / step_s:.0f}", f"{step_s * 1e3:.2f}"]
        rows.append([name, count, *figures, f"{floor_s * 1e3:.2f}", f"{floor_s / step_s:.0%}"])
        print(row(*rows[-1]), flush=True)
    count, prompt = PROMPTS[0], PROMPTS[1] // run.scale
    for _ in range(2):  # the first run warms up
        records = ask_all(url, [Request(rng.choices(IDS, k=prompt), 1) for _ in range(count)], stream=False)
    rate = count * prompt / elapsed_s(records)
    flops = rate * token_flops
    print(f"T1: {rate:.0f} prompt tok/s, {flops / 1e12:.0f} TFLOP/s of layers, {flops / peak:.0%} of the limit")
    return {"loads": rows, "prompt_tokens_per_s": rate}


def peer(run: Run) -> None:
    """Time transformers with 1 and 8 rows, and count the greedy tokens that begin like the server's."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cpu" if run.dry else "cuda"
    model = AutoModelForCausalLM.from_pretrained(run.models / "0.6b", dtype=torch.bfloat16).to(device)
    unknown = [[list(IDS[:128]), []]] * ALIKE
    prompts, wanted = zip(*run.figures("serve-0.6b").get("greedy", unknown), strict=True)
    count, rates = FIELDS["max_tokens"], {}
    for rows in (1, ALIKE):
        ids = torch.tensor(prompts[:rows], device=device)
        fixed: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **fixed)
        start_s = time.perf_counter()
        output = model.generate(ids, max_new_tokens=count, min_new_tokens=count, **fixed)[:, ids.shape[1] :].tolist()
        rates[rows] = rows * count / (time.perf_counter() - start_s)
    alike = [common_start(one, other) for one, other in zip(wanted, output, strict=True)]
    print(f"1 row: {rates[1]:.0f} tok/s; {ALIKE} rows: {rates[ALIKE]:.0f} tok/s")
    print(f"of {count} greedy tokens, alike before the first difference: {alike}")
    run.save("transformers", {"tok_per_s": rates, "alike": alike})


def limits(run: Run) -> None:
    """Measure what the card can do."""
    from cuda_kernels import measure_limits

    figures = measure_limits()
    print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in figures.items()))
    run.save("limits", figures)


def kernels(run: Run) -> None:
    """Time kernels."""
    from cuda_kernels import measure_kernels

    for figures in measure_kernels(run.figures("limits").get("read_bytes_per_s", math.nan)):
        run.save("kernels", figures)


def compile_kernels(run: Run) -> None:
    """Compile kernels ahead, so that `kernels` only measures."""
    from cuda_kernels import compile_ahead

    print(f"compiled {compile_ahead()} launches")


class Part(NamedTuple):
    """Its time limit in seconds, and whether it runs beside others."""

    call: Callable[[Run], None]
    limit_s: float
    beside: bool = False


PARTS = {
    "self-tests": Part(self_tests, 100, True),
    "checkpoints": Part(checkpoints, 75, True),
    "compile": Part(compile_kernels, 75, True),
    "limits": Part(limits, 25),
    "serve-0.6b": Part(lambda run: serve(run, "0.6b"), 90),
    "serve-8b": Part(lambda run: serve(run, "8b"), 100),
    "transformers": Part(peer, 40),
    "kernels": Part(kernels, 75),
}


def run_parts(out: Path, names: Sequence[str], start_s: float, end_s: float) -> None:
    """Run parts at the same time; print what each printed, and how it ended."""
    processes, began_s = dict[str, subprocess.Popen[bytes]](), time.monotonic()
    try:
        for name in names:
            with (out / f"{name}.txt").open("w") as text, (out / f"{name}.log").open("w") as log:
                command = [sys.executable, *sys.argv, "--part", name]
                processes[name] = subprocess.Popen(command, stdout=text, stderr=log, start_new_session=True)
        for name, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(1, min(began_s + PARTS[name].limit_s, end_s) - time.monotonic()))
            ended = {None: ", STOPPED at its limit", 0: ""}.get(process.poll(), ", FAILED")
            stop(process)
            now_s, said = time.monotonic(), (out / f"{name}.txt").read_text().strip()
            print(f"\n## {name}: {now_s - began_s:.0f} s, until {now_s - start_s:.0f} s{ended}\n{said}", flush=True)
            if ended:
                print((out / f"{name}.log").read_text().strip()[-700:], flush=True)
    finally:
        for process in processes.values():
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)


def main(
    out: Annotated[Path, typer.Option(help="Folder for figures and logs.")],
    models: Annotated[Path, typer.Option(help="Folder for checkpoints, 18 GB, which stay.")] = Path("/tmp/pypto-cuda"),
    only: Annotated[str, typer.Option(help="Parts, comma-separated, in this order.")] = ",".join(PARTS),
    limit: Annotated[float, typer.Option(help="Seconds for all parts together.")] = 345,
    dry: Annotated[bool, typer.Option("--dry", help="Tiny shapes, without a card.")] = False,
    backend: Annotated[str, typer.Option(help="Backend of the servers; cpu in a dry run.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="A further word of the serve command; may repeat.")] = None,
    part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the parts and print their tables."""
    start_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if part:
        run = Run(out, models, dry, backend or ("cpu" if dry else "cuda"), tuple(option or ()))
        (out / f"{part}.json").unlink(missing_ok=True)
        return PARTS[part].call(run)
    names, end_s = only.split(","), start_s + limit
    groups = [[name for name in names if PARTS[name].beside], *([name] for name in names if not PARTS[name].beside)]
    for group in filter(None, groups):
        if end_s - time.monotonic() > 10:
            run_parts(out, group, start_s, end_s)
    print(f"\nended after {time.monotonic() - start_s:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
