"""Measure what drafts add to the speed: two servers of one model, with and without them, answer the same load in turns.

    python benchmarks/make_copier.py COPIER
    python benchmarks/make_checkpoint.py 0.6b RANDOM
    python benchmarks/make_checkpoint.py deepseek-v4-1b-agreeing AGREEING
    python benchmarks/make_checkpoint.py deepseek-v4-1b DISAGREEING
    python benchmarks/speculation.py COPIER RANDOM AGREEING DISAGREEING

| load | model | prompt | answer |
|---|---|---|---|
| edit | COPIER | a file of 1,500 tokens | the file again, with five names changed |
| random | RANDOM | 128 random tokens | 128 tokens, greedy: nothing is to be guessed |
| misses | RANDOM | 128 random tokens | 128 of four tokens, at random: all seem to come again, and 1 of 4 does |
| agrees | AGREEING | 128 random tokens | 128 tokens, greedy: the draft layer predicts all but the first |
| disagrees | DISAGREEING | 128 random tokens | 128 tokens, greedy: the draft layer predicts none |

Each is asked alone and with `--at-once` others. Answers of both servers must be the same, and those of `edit` right.
Ratios are of tokens per second after the first token, and of whole requests; both servers are up all the time. With
`--vllm FOLDER`, where compare.py installs its peers, vLLM's CPU build answers the loads of n-grams too.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import rounds as turns
import typer
from make_copier import PROMPT, RENAMED
from pairs import IDS
from peers import Checkpoint, Vllm
from servers import PROGRAM, Request, ask_all, elapsed_s, running, served
from tokenizers import Tokenizer

from pypto_serving.bench.client import read_draft_counters
from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import Target

WORDS = (
    "for", "def", "let", "end", "int", "key", "map", "set", "get", "put", "add", "row", "col", "sum", "max", "min",
    "box", "dot", "gap", "hex", "ink", "job", "kit", "lap", "mix", "new", "old", "pin", "run", "sub", "tag", "use",
)  # fmt: skip
MARKS = ("(", ")", " = ", "\n", ": ", " + ", "[", "]", ", ", ".", "\n\n")
EDIT_SHARE = 0.03
"""Share of the words that are renamed ones."""


def make_file(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Return PROMPT tokens that look like a program: lines come again with other words."""
    ids: list[int] = []
    shapes = [[rng.choice(MARKS) for _ in range(rng.randint(3, 8))] for _ in range(12)]
    while len(ids) < PROMPT:
        words = [rng.choice(tuple(RENAMED)) if rng.random() < EDIT_SHARE else rng.choice(WORDS) for _ in range(9)]
        line = "".join(word + mark for word, mark in zip(words, rng.choice(shapes), strict=False)) + "\n"
        ids += tokenizer.encode(line, add_special_tokens=False).ids
    return ids[:PROMPT]


def edited(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the right answer to a file."""
    names = {tokenizer.token_to_id(old): tokenizer.token_to_id(new) for old, new in RENAMED.items()}
    return [names.get(token, token) for token in ids]


def speeds(answers: list[RequestRecord]) -> tuple[float, float]:
    """Return tokens per second after the first tokens, and in all."""
    num_tokens = sum(answer.output_tokens for answer in answers)
    last_s, first_s = elapsed_s(answers), statistics.mean(answer.ttft_s or 0.0 for answer in answers)
    return (num_tokens - len(answers)) / (last_s - first_s), num_tokens / last_s


class Load(NamedTuple):
    """`make` makes one request of a load; `right` says what its text must be, or nothing."""

    model: Path
    method: str
    make: Callable[[random.Random], Request]
    right: Callable[[list[int]], str] = lambda prompt: ""


def loads(copier: Path, plain: Path, agreeing: Path, disagreeing: Path, output: int) -> dict[str, Load]:
    tokenizer = Tokenizer.from_file(str(copier / "tokenizer.json"))

    def edit(rng: random.Random) -> Request:
        return Request(make_file(tokenizer, rng), output)

    def drawn(rng: random.Random) -> Request:
        return Request(rng.choices(IDS, k=128), 128)

    def missing(rng: random.Random) -> Request:
        few = rng.sample(IDS, 4)
        fields = {"temperature": 3.0, "seed": rng.getrandbits(30), "allowed_token_ids": few}
        return drawn(rng)._replace(fields=fields)

    return {
        "edit": Load(copier, "ngram", edit, lambda prompt: tokenizer.decode(edited(tokenizer, prompt)[:output])),
        "random": Load(plain, "ngram", drawn),
        "misses": Load(plain, "ngram", missing),
        "agrees": Load(agreeing, "mtp", drawn),
        "disagrees": Load(disagreeing, "mtp", drawn),
    }


def main(
    copier: Annotated[Path, typer.Argument(help="What make_copier.py wrote.")],
    plain: Annotated[Path, typer.Argument(help="What make_checkpoint.py wrote in the shape 0.6b.")],
    agreeing: Annotated[Path, typer.Argument(help="In the shape deepseek-v4-1b-agreeing.")],
    disagreeing: Annotated[Path, typer.Argument(help="In the shape deepseek-v4-1b.")],
    only: Annotated[str, typer.Option(help="Loads to measure, separated by commas.")] = "edit,random,misses,"
    "agrees,disagrees",
    drafts: Annotated[int, typer.Option(help="Maximum drafts of a step that are looked up.")] = 8,
    passes: Annotated[int, typer.Option(help="Maximum drafts of a step from a draft layer.")] = 2,
    at_once: Annotated[int, typer.Option(help="Requests at once, beside one alone.")] = 8,
    output: Annotated[int, typer.Option(help="Tokens of the file that are written again.")] = 512,
    rounds: Annotated[int, typer.Option(min=2, help="Pairs of each load.")] = 5,
    vllm: Annotated[Path | None, typer.Option(help="Measure vLLM's n-grams too; the folder it is in.")] = None,
) -> None:
    """Print the speeds, and the ratio of each pair: median and range."""
    print(turns.head("load", "at once", "without tok/s", "with", "speed-up (range)", "of whole requests", "accepted"))
    every, most = loads(copier, plain, agreeing, disagreeing, output), {"ngram": drafts, "mtp": passes}
    for name in only.split(","):
        load = every[name]
        command = [*PROGRAM, "serve", str(load.model)]
        options = ["--spec-method", load.method, "--spec-tokens", str(most[load.method])]
        with ExitStack() as stack:
            urls = [stack.enter_context(served(each))["url"] for each in (command, command + options)]
            for count in dict.fromkeys((1, at_once)):
                print(row(name, count, load, urls, rounds), flush=True)
        if vllm is not None and load.method == "ngram":
            with ExitStack() as stack:
                urls = [stack.enter_context(peer(vllm, load.model, most)) for most in (0, drafts)]
                for count in dict.fromkeys((1, at_once)):
                    print(row(f"{name}, vLLM", count, load, urls, rounds, exact=False), flush=True)


@contextmanager
def peer(root: Path, model: Path, drafts: int) -> Iterator[str]:
    """Run vLLM with at most this many drafts, looked up as ours are."""
    looked_up = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    vllm = Vllm()
    vllm.prepare(root)
    launch = vllm.launch(Checkpoint(model), root)
    if drafts:
        launch = launch.with_flags("--speculative-config", json.dumps(looked_up))
    with running(launch, root / "log" / f"speculation-{drafts}.log") as server:
        yield server.url


def row(name: str, count: int, load: Load, urls: list[str], rounds: int, exact: bool = True) -> str:
    """Measure a load in pairs, in which the first server is another one each time; the first pair is not counted.

    If `exact`, answers must be equal and right.
    """
    rng = random.Random(f"{name} {count}")
    found: tuple[list[list[RequestRecord]], list[list[RequestRecord]]] = ([], [])
    asked = [[load.make(rng) for _ in range(count)] for _ in range(1 + rounds)]
    before: Counter[str | int] = Counter()
    for number, which in turns.in_turns((0, 1), 1 + rounds):
        found[which].append(ask_all(urls[which], asked[number]))
        if not number:
            before = drafted(urls[1])
    for requests, plain, guessed in zip(asked, *found, strict=True):
        for request, one, other in zip(requests, plain, guessed, strict=True) if exact else ():
            assert one.text == other.text, "drafts changed an answer"
            assert one.text == (load.right(request.prompt) or one.text), "the model does not edit"
    (plain_rates, plain_whole), (rates, whole) = (
        zip(*(speeds(answers) for answers in side[1:]), strict=True) for side in found
    )
    counts = drafted(urls[1]) - before
    accepted = f"{counts['num_accepted_tokens']} of {counts['num_draft_tokens']}"
    middle = (f"{statistics.median(side):.1f}" for side in (plain_rates, rates))
    of_whole = f"{statistics.median(turns.ratios(whole, plain_whole)):.2f}"
    return turns.row(name, count, *middle, turns.spread(turns.ratios(rates, plain_rates)), of_whole, accepted)


def drafted(url: str) -> Counter[str | int]:
    """Return the server's counters of drafts."""
    return asyncio.run(read_draft_counters(Target(base_url=url))) or Counter()


if __name__ == "__main__":
    typer.run(main)
