"""Accuracy of greedy replies, per task and per length of the earlier chat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from . import arithmetic, common_requests, held_keys, json_answers, odd_input, refusals, skills, tool_questions
from .chats import Chat
from .practice import Practice
from .tokenizer import Encoder
from .tool_chats import SIGNATURES, ToolChat
from .tools import calls_text, system_text

Row = tuple[list[int], list[bool]]
"""Ids, and which of them the model should write."""
Starts = Sequence[list[int]]
"""The ids of earlier chats, each of which is gone on with."""

BATCH = 128
CHATS = 20
NOTHING: Starts = [[]]
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
    "common requests": common_requests.common_request,
    "letters without an end": held_keys.held_key,
    "JSON on request": json_answers.json_answer,
    "functions that are not there": tool_questions.without_tools,
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
    return _extended([], Chat(rng, Practice(arithmetic.PROBLEMS), arithmetic_share=0.4), encoder, tokens)


def earlier_chats(encoder: Encoder, tokens: int, seed: int) -> Starts:
    """Return several earlier chats, or one that is empty."""
    rng = random.Random(seed)
    return [earlier_chat(rng, encoder, tokens) for _ in range(CHATS if tokens else 1)]


def earlier_tool_chats(encoder: Encoder, tokens: int, seed: int) -> Starts:
    """Return the beginnings of chats with both functions."""
    rng = random.Random(seed)
    chats = [tool_chat(rng) for _ in range(CHATS if tokens else 1)]
    offer = encoder.message("system", system_text(None, SIGNATURES.values()))
    return [_extended(offer, chat, encoder, tokens) for chat in chats]


def tool_chat(rng: random.Random) -> ToolChat:
    """Return a chat with both functions."""
    return ToolChat(rng, Practice(arithmetic.PROBLEMS), 0.3, list(SIGNATURES.values()))


def _extended(ids: list[int], chat: Chat, encoder: Encoder, tokens: int) -> list[int]:
    """Return ids with turns of the chat behind them, until there are that many."""
    ids = list(ids)
    while len(ids) < tokens:
        turn = chat.next_turn()
        ids += encoder.turn(turn.question, turn.reply)[0]
    return ids


def call_turns(kind: str, count: int, seed: int) -> list[skills.Pair]:
    """Return unseen questions that need a function, each with the calls to make."""
    rng = random.Random(f"{kind} {seed}")
    asked = [tool_questions.ask(rng, kind, unseen=True) for _ in range(count)]
    return [(question, calls_text(calls)) for question, calls in asked]


def json_turns(count: int, seed: int) -> list[skills.Pair]:
    """Return unseen requests for JSON."""
    rng = random.Random(f"JSON {seed}")
    return [json_answers.json_answer(rng, unseen=True) for _ in range(count)]


def result_rows(encoder: Encoder, count: int, seed: int) -> list[Row]:
    """Return results of calls, each behind the question and the calls, with what is to be said about them."""
    rng = random.Random(f"results {seed}")
    rows = []
    for kind in rng.choices(list(tool_questions.KINDS), k=count):
        question, calls = tool_questions.ask(rng, kind, unseen=True)
        asked, _ = encoder.turn(question, calls_text(calls))
        answered, wanted = encoder.turn(*tool_questions.respond(rng, calls))
        rows.append((asked + answered, [False] * len(asked) + wanted))
    return rows


def plain_turns(count: int, seed: int) -> list[skills.Pair]:
    """Return questions that need no function, to be asked where there are some."""
    chat = tool_chat(random.Random(f"plain {seed}"))
    turns = (chat.plain_turn() for _ in range(2 * count))
    return [(turn.question, turn.reply) for turn in turns if turn.alone][:count]


def encoded(encoder: Encoder, turns: Iterable[skills.Pair]) -> list[Row]:
    """Encode turns, whose replies are expected."""
    return [encoder.turn(question, reply) for question, reply in turns]


def every_problem(seed: int, form: str | None = None) -> list[skills.Pair]:
    """Return a question for each problem, in one form such as "{a}{o}{b} =" or each in one drawn at random."""
    rng = random.Random(seed)
    asked = (form.format(a=p.a, o=p.operator, b=p.b) if form else arithmetic.ask(rng, p) for p in arithmetic.PROBLEMS)
    return [(question, p.reply) for question, p in zip(asked, arithmetic.PROBLEMS, strict=True)]


def leads(model: Qwen3ForCausalLM, rows: Sequence[Row], starts: Starts = NOTHING, threads: int = 2) -> list[float]:
    """Return by how many logits the expected reply leads at its weakest token, behind one of the earlier chats.

    Greedy decoding follows the expected reply if and only if every one of its tokens is the most likely one
    after those before it, so a single pass over prompt and reply decides: the lead is positive. Each earlier
    chat is computed once and serves its share of the rows.
    """
    places = list(range(len(rows)))
    random.Random(0).shuffle(places)

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
