"""Accuracy of greedy replies, per task and per length of the earlier chat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import Qwen3ForCausalLM

from . import arithmetic, refusals, skills
from .chats import Chat
from .tokenizer import Encoder

TASKS: dict[str, Callable[[random.Random], skills.Pair]] = {
    "greetings": skills.small_talk,
    "facts": skills.fact,
    "counting": skills.counting,
    "number order": skills.number_order,
    "spelling": skills.spelling,
    "alphabet, days, months": skills.order,
    "repeating": skills.echo,
    "unknown questions": refusals.unknown,
    "other calculations": refusals.out_of_range,
}


def held_out_turns(count: int, seed: int, operators: str = "+-") -> list[skills.Pair]:
    """Return held-out problems, in varied phrasings, with the replies the model should give."""
    rng = random.Random(seed)
    problems = [p for p in arithmetic.all_problems(held_out=True) if p.operator in operators]
    return [(arithmetic.ask(rng, p), p.reply) for p in rng.sample(problems, count)]


def task_turns(task: str, count: int, seed: int) -> list[skills.Pair]:
    """Return freshly generated questions of one task."""
    rng = random.Random(f"{task} {seed}")
    return [TASKS[task](rng) for _ in range(count)]


def earlier_chat(rng: random.Random, encoder: Encoder, tokens: int) -> list[int]:
    """Return at least `tokens` ids of unrelated chat, or none."""
    chat = Chat(rng, arithmetic_share=0.4)
    ids: list[int] = []
    while len(ids) < tokens:
        ids += encoder.turn(*chat.next_turn())[0]
    return ids


def exact_replies(
    model: Qwen3ForCausalLM,
    encoder: Encoder,
    turns: Iterable[skills.Pair],
    earlier: int = 0,
    seed: int = 0,
    threads: int = 2,
) -> list[bool]:
    """Say for each turn whether greedy decoding gives exactly the expected reply.

    Greedy decoding follows the expected reply if and only if every one of its tokens is the most likely one
    after those before it, so a single pass over prompt and reply decides.
    """
    rng = random.Random(seed)
    rows = []
    for question, reply in turns:
        ids, learnt = encoder.turn(question, reply)
        start = earlier_chat(rng, encoder, earlier)
        rows.append((start + ids, [False] * len(start) + learnt))

    @torch.inference_mode()
    def check(chosen: list[int]) -> list[bool]:
        width = max(len(rows[i][0]) for i in chosen)
        ids = torch.tensor([rows[i][0] + [0] * (width - len(rows[i][0])) for i in chosen])
        wanted = torch.tensor([rows[i][1] + [False] * (width - len(rows[i][1])) for i in chosen])
        likeliest = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        right = (likeliest == ids[:, 1:]) | ~wanted[:, 1:]
        return right.all(-1).tolist()

    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    batch = max(1, 4096 // max(64, earlier))
    chunks = [by_length[first : first + batch] for first in range(0, len(rows), batch)]
    exact = [False] * len(rows)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for chosen, values in zip(chunks, pool.map(check, chunks), strict=True):
            for i, value in zip(chosen, values, strict=True):
                exact[i] = value
    return exact


def share(values: list[bool]) -> float:
    """Return the share of true values in percent."""
    return 100.0 * sum(values) / len(values)


def accuracy_table(
    model: Qwen3ForCausalLM, encoder: Encoder, seed: int = 0, count: int = 1000
) -> list[tuple[str, int, int, float]]:
    """Return (task, tokens of earlier chat, questions, percent right) for every task."""
    table = []
    for earlier, questions in ((0, count), (1000, count), (1500, count), (3500, count // 10)):
        for label, operators in (("held-out sums", "+"), ("held-out differences", "-")):
            turns = held_out_turns(questions, seed, operators)
            table.append((label, earlier, questions, share(exact_replies(model, encoder, turns, earlier, seed))))
    for task in TASKS:
        turns = task_turns(task, 200, seed)
        table.append((task, 0, 200, share(exact_replies(model, encoder, turns))))
    return table


def format_table(table: list[tuple[str, int, int, float]]) -> str:
    """Lay the table out as Markdown."""
    head = "| Task | Tokens of earlier chat | Questions | Exactly right |\n|---|---:|---:|---:|\n"
    return head + "".join(f"| {task} | {earlier} | {n} | {percent:.1f} % |\n" for task, earlier, n, percent in table)
