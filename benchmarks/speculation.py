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

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import rounds as turns
import typer
from make_copier import PROMPT, RENAMED
from pairs import FIRST_ID, LAST_ID
from peers import Checkpoint, Vllm
from servers import PROGRAM, running, served
from tokenizers import Tokenizer

WORDS = (
    "for", "def", "let", "end", "int", "key", "map", "set", "get", "put", "add", "row", "col", "sum", "max", "min",
    "box", "dot", "gap", "hex", "ink", "job", "kit", "lap", "mix", "new", "old", "pin", "run", "sub", "tag", "use",
)  # fmt: skip
MARKS = ("(", ")", " = ", "\n", ": ", " + ", "[", "]", ", ", ".", "\n\n")
EDIT_SHARE = 0.03
"""Share of the words that are renamed ones."""

Body = dict[str, Any]


class Answer(NamedTuple):
    """The text of a reply, seconds to its first token and to its last, and its drafts."""

    text: str
    first_s: float
    last_s: float
    num_tokens: int
    accepted: int
    rejected: int


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


def ask(client: httpx.Client, body: Body) -> Answer:
    """Send a request and follow its stream."""
    start, first_s, text, usage = time.perf_counter(), 0.0, "", {}
    with client.stream("POST", "/v1/completions", json=body | STREAMED) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first_s = first_s or time.perf_counter() - start
                text += choice["text"]
    details = usage.get("completion_tokens_details") or {}
    return Answer(
        text,
        first_s,
        time.perf_counter() - start,
        usage["completion_tokens"],
        details.get("accepted_prediction_tokens", 0),
        details.get("rejected_prediction_tokens", 0),
    )


STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


def ask_all(client: httpx.Client, bodies: list[Body]) -> list[Answer]:
    """Send all requests at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(client, body), bodies))


def speeds(answers: list[Answer]) -> tuple[float, float]:
    """Return tokens per second after the first tokens, and in all."""
    last_s = max(answer.last_s for answer in answers)
    first_s = statistics.mean(answer.first_s for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return (num_tokens - len(answers)) / (last_s - first_s), num_tokens / last_s


class Load(NamedTuple):
    """`body` makes one request of a load; `right` says what its text must be, or nothing."""

    model: Path
    method: str
    body: Callable[[random.Random], Body]
    right: Callable[[Body], str] = lambda body: ""


def loads(copier: Path, plain: Path, agreeing: Path, disagreeing: Path, output: int) -> dict[str, Load]:
    tokenizer = Tokenizer.from_file(str(copier / "tokenizer.json"))

    def edit(rng: random.Random) -> Body:
        return {"prompt": make_file(tokenizer, rng), "max_tokens": output, "temperature": 0}

    def drawn(rng: random.Random) -> Body:
        return {"prompt": rng.choices(range(FIRST_ID, LAST_ID), k=128), "max_tokens": 128, "temperature": 0}

    def missing(rng: random.Random) -> Body:
        few = rng.sample(range(FIRST_ID, LAST_ID), 4)
        return drawn(rng) | {"temperature": 3.0, "seed": rng.getrandbits(30), "allowed_token_ids": few}

    return {
        "edit": Load(copier, "ngram", edit, lambda body: tokenizer.decode(edited(tokenizer, body["prompt"])[:output])),
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
            readies = [stack.enter_context(served(each)) for each in (command, command + options)]
            clients = [httpx.Client(base_url=ready["url"], timeout=600) for ready in readies]
            for count in dict.fromkeys((1, at_once)):
                print(row(name, count, load, clients, rounds), flush=True)
        if vllm is not None and load.method == "ngram":
            with ExitStack() as stack:
                clients = [stack.enter_context(peer(vllm, load.model, most)) for most in (0, drafts)]
                for count in dict.fromkeys((1, at_once)):
                    print(row(f"{name}, vLLM", count, load, clients, rounds, exact=False), flush=True)


@contextmanager
def peer(root: Path, model: Path, drafts: int) -> Iterator[httpx.Client]:
    """Run vLLM with at most this many drafts, looked up as ours are."""
    looked_up = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    vllm = Vllm()
    vllm.prepare(root)
    launch = vllm.launch(Checkpoint(model), root)
    if drafts:
        launch = launch.with_flags("--speculative-config", json.dumps(looked_up))
    with running(launch, root / "log" / f"speculation-{drafts}.log") as server:
        yield httpx.Client(base_url=server.url, timeout=600)


def row(name: str, count: int, load: Load, clients: list[httpx.Client], rounds: int, exact: bool = True) -> str:
    """Measure a load in pairs, in which the first server is another one each time; the first pair is not counted.

    If `exact`, answers must be equal and right.
    """
    rng = random.Random(f"{name} {count}")
    found: tuple[list[list[Answer]], list[list[Answer]]] = ([], [])
    bodies = [[load.body(rng) for _ in range(count)] for _ in range(1 + rounds)]
    for number, which in turns.in_turns((0, 1), 1 + rounds):
        found[which].append(ask_all(clients[which], bodies[number]))
    for asked, plain, guessed in zip(bodies, *found, strict=True):
        for body, one, other in zip(asked, plain, guessed, strict=True) if exact else ():
            assert one.text == other.text, "drafts changed an answer"
            assert one.text == (load.right(body) or one.text), "the model does not edit"
    (before, before_whole), (after, after_whole) = (
        zip(*(speeds(answers) for answers in side[1:]), strict=True) for side in found
    )
    drafted = [answer for answers in found[1][1:] for answer in answers]
    accepted = sum(answer.accepted for answer in drafted)  # which vLLM does not say
    verified = accepted + sum(answer.rejected for answer in drafted)
    whole = statistics.median(turns.ratios(after_whole, before_whole))
    middle = (f"{statistics.median(side):.1f}" for side in (before, after))
    speed_up = turns.spread(turns.ratios(after, before))
    return turns.row(name, count, *middle, speed_up, f"{whole:.2f}", f"{accepted} of {verified}")


if __name__ == "__main__":
    typer.run(main)
