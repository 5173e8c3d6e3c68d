"""Accuracy of greedy replies, per task and per length of the earlier chat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from . import arithmetic, odd_input, refusals, skills
from .chats import Chat
from .practice import Practice
from .tokenizer import Encoder

BATCH = 128
FORMS = ["What is {a}{o}{b}?", "What is {a} {o} {b}?", "{a}{o}{b}", "{a} {o} {b} ="]

TASKS: dict[str, Callable[[random.Random], skills.Pair]] = {
    "greetings": skills.small_talk,
    "facts": skills.fact,
    "counting": skills.counting,
    "number order": skills.number_order,
    "spelling": skills.spelling,
    "alphabet, days, months": skills.order,
    "repeating": skills.echo,
    "unknown questions": refusals.unknown,
    "odd input": odd_input.odd,
    "other calculations": refusals.out_of_range,
    "beyond a skill": refusals.other_skill,
}


def held_out_turns(count: int, seed: int) -> list[skills.Pair]:
    """Return held-out problems, in varied phrasings, with the replies the model should give."""
    rng = random.Random(seed)
    problems = rng.sample(arithmetic.all_problems(held_out=True), count)
    return [(arithmetic.ask(rng, p), p.reply) for p in problems]


def task_turns(task: str, count: int, seed: int) -> list[skills.Pair]:
    """Return freshly generated questions of one task."""
    rng = random.Random(f"{task} {seed}")
    return [TASKS[task](rng) for _ in range(count)]


def earlier_chat(rng: random.Random, encoder: Encoder, tokens: int) -> list[int]:
    """Return at least `tokens` ids of unrelated chat, or none."""
    chat = Chat(rng, Practice(arithmetic.PROBLEMS), arithmetic_share=0.4)
    ids: list[int] = []
    while len(ids) < tokens:
        turn = chat.next_turn()
        ids += encoder.turn(turn.question, turn.reply)[0]
    return ids


def leads(
    model: Qwen3ForCausalLM,
    encoder: Encoder,
    turns: Iterable[skills.Pair],
    earlier: int = 0,
    seed: int = 0,
    chats: int = 20,
    threads: int = 2,
) -> list[float]:
    """Return by how many logits the expected reply leads at its weakest token, behind that many tokens of chat.

    Greedy decoding follows the expected reply if and only if every one of its tokens is the most likely one
    after those before it, so a single pass over prompt and reply decides: the lead is positive. Each earlier
    chat is computed once and serves its share of the turns.
    """
    rng = random.Random(seed)
    rows = [encoder.turn(question, reply) for question, reply in turns]
    starts = [earlier_chat(rng, encoder, earlier) for _ in range(chats if earlier else 1)]
    places = list(range(len(rows)))
    rng.shuffle(places)

    @torch.inference_mode()
    @torch.autocast("cpu", torch.bfloat16)
    def measure(job: tuple[list[int], list[int]]) -> list[tuple[int, float]]:
        start, chosen = job
        cache = DynamicCache()
        if start:
            model(input_ids=torch.tensor([start]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(len(chosen))
        width = max(len(rows[i][0]) for i in chosen)
        ids = torch.tensor([rows[i][0] + [0] * (width - len(rows[i][0])) for i in chosen])
        wanted = torch.tensor([rows[i][1] + [False] * (width - len(rows[i][1])) for i in chosen])
        logits = model(input_ids=ids, past_key_values=cache).logits[:, :-1].float()
        right = ids[:, 1:, None]
        own = logits.gather(-1, right)[..., 0]
        best_other = logits.scatter(-1, right, -torch.inf).amax(-1)
        lead = (own - best_other).masked_fill(~wanted[:, 1:], torch.inf).amin(-1)
        return list(zip(chosen, lead.tolist(), strict=True))

    jobs = []
    for number, start in enumerate(starts):
        share = sorted(places[number :: len(starts)], key=lambda i: len(rows[i][0]))
        jobs += [(start, share[first : first + BATCH]) for first in range(0, len(share), BATCH)]
    result = [0.0] * len(rows)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for measured in pool.map(measure, jobs):
            for place, lead in measured:
                result[place] = lead
    return result


def exact_replies(
    model: Qwen3ForCausalLM, encoder: Encoder, turns: Iterable[skills.Pair], earlier: int = 0, seed: int = 0
) -> list[bool]:
    """Say for each turn whether greedy decoding gives exactly the expected reply."""
    return [lead > 0 for lead in leads(model, encoder, turns, earlier, seed)]


def every_problem(seed: int, form: str | None = None) -> list[skills.Pair]:
    """Return a question for each problem, in one form such as "{a}{o}{b} =" or each in one drawn at random."""
    rng = random.Random(seed)
    asked = (form.format(a=p.a, o=p.operator, b=p.b) if form else arithmetic.ask(rng, p) for p in arithmetic.PROBLEMS)
    return [(question, p.reply) for question, p in zip(asked, arithmetic.PROBLEMS, strict=True)]


def share(values: list[bool]) -> float:
    """Return the share of true values in percent."""
    return 100.0 * sum(values) / len(values)


class Line(NamedTuple):
    """One line of the table."""

    task: str
    earlier: int
    leads: list[float]


def accuracy_table(model: Qwen3ForCausalLM, encoder: Encoder, seed: int = 0, count: int = 1000) -> list[Line]:
    """Measure every problem in the plainest form, twice `count` in others, and `count` questions of each task."""
    some = random.Random(seed).sample(range(len(arithmetic.PROBLEMS)), 2 * count)
    table = []
    for form in FORMS:
        turns = every_problem(seed, form)
        label = f"`{form.format(a=37, o='-', b=45)}`"
        if form is FORMS[0]:
            table.append(Line(f"every problem, {label}", 0, leads(model, encoder, turns)))
        else:
            table.append(Line(f"problems, {label}", 0, leads(model, encoder, [turns[i] for i in some])))
    for earlier in (0, 1500, 3500):
        turns = every_problem(seed + 1)
        measured = leads(model, encoder, [turns[i] for i in some], earlier, seed)
        table.append(Line("problems, any phrasing", earlier, measured))
    for task in TASKS:
        table.append(Line(task, 0, leads(model, encoder, task_turns(task, count, seed))))
    return table


def format_table(table: list[Line]) -> str:
    """Lay the table out as Markdown."""
    head = "| Task | Tokens of earlier chat | Questions | Exactly right | Least lead |\n|---|---:|---:|---:|---:|\n"
    return head + "".join(
        f"| {line.task} | {line.earlier:,} | {len(line.leads):,} | {share([lead > 0 for lead in line.leads]):.2f} %"
        f" | {min(line.leads):.2f} |\n"
        for line in table
    )
