"""Compare our engine with llama.cpp on one GGUF file, in turns: W1, W2 and a prompt of 512 tokens.

    python benchmarks/llama_gguf.py FILE.gguf
    python benchmarks/llama_gguf.py FILE.gguf --activations int8 --rounds 9

llama.cpp is node-llama-cpp's build for this machine, which npm installs into a folder outside of the repository. Both
get the same random tokens, decode greedily and never stop early.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pypto_serving import LLM, SamplingParams
from pypto_serving.setup.host import read_host_facts

LLAMA = "node-llama-cpp@3"
WORKLOADS = {"W1": (1, 128, 128), "W2": (8, 128, 128), "prompt": (1, 512, 1)}
"""Prompts at once, their tokens, and tokens of an answer."""
Run = Callable[[list[list[int]], int], float]


def start_llama(file: Path, folder: Path, threads: int) -> Run:
    """Install llama.cpp into `folder` unless it is there; return what runs prompts in a process of it."""
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", LLAMA], check=True)
    command = ["node", Path(__file__).with_name("llama_gguf.mjs"), folder.absolute(), file.absolute(), str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(prompts: list[list[int]], tokens: int) -> float:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return run


def start_ours(file: Path, options: dict[str, Any]) -> Run:
    """Return what runs prompts in our engine."""
    llm = LLM(str(file), max_model_len=1024, **options)

    def run(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return time.perf_counter() - start

    return run


def main(
    file: Path,
    activations: Annotated[str, typer.Option(help="bf16 or int8, as in `serve`.")] = "bf16",
    rounds: int = 5,
    vocab: Annotated[int, typer.Option(help="Tokens are below this.")] = 40_000,
    folder: Annotated[Path, typer.Option(help="Where llama.cpp is installed.")] = Path("~/.cache/llama-node"),
) -> None:
    """Print the medians, and how many times as fast ours is."""
    folder = folder.expanduser()
    threads, rng = read_host_facts().num_cpus, np.random.default_rng(0)
    systems = {"llama.cpp": start_llama(file, folder, threads), "ours": start_ours(file, {"activations": activations})}
    for name, (count, length, tokens) in WORKLOADS.items():
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for _ in range(rounds + 1):
            prompts = rng.integers(300, vocab, (count, length)).tolist()
            for system, run in systems.items():
                seconds[system].append(run(prompts, tokens))
        medians = {system: statistics.median(found[1:]) for system, found in seconds.items()}
        processed = count * (tokens if tokens > 1 else length)
        rates = ", ".join(f"{system} {processed / median:.1f} tokens/s" for system, median in medians.items())
        print(f"{name}: {rates}, {medians['llama.cpp'] / medians['ours']:.2f} times", flush=True)


if __name__ == "__main__":
    typer.run(main)
