"""The table of scores: how many greedy replies are exactly right, per task and per length of the earlier chat."""

from __future__ import annotations

import random
from typing import NamedTuple

from transformers import Qwen3ForCausalLM

from . import evaluation, tool_questions
from .evaluation import encoded, leads
from .tokenizer import Encoder

CALLS = 500


class Line(NamedTuple):
    """One line of the table."""

    task: str
    earlier: int
    leads: list[float]


def score_table(model: Qwen3ForCausalLM, encoder: Encoder, seed: int = 0, count: int = 1000) -> list[Line]:
    """Measure every problem in the plainest form, twice `count` in others, and `count` questions of each task."""
    return [
        *_problems(model, encoder, seed, count),
        *_tasks(model, encoder, seed, count),
        *_tools(model, encoder, seed),
    ]


def _problems(model: Qwen3ForCausalLM, encoder: Encoder, seed: int, count: int) -> list[Line]:
    """Measure sums and differences."""
    table = []
    for form in evaluation.FORMS:
        rows = encoded(encoder, evaluation.every_problem(seed, form))
        table.append(Line(f"every problem, `{form.format(a=37, o='-', b=45)}`", 0, leads(model, rows)))
    rows = encoded(encoder, evaluation.every_problem(seed + 1))
    some = random.Random(seed).sample(rows, 2 * count)
    for earlier in (0, 1500, 3500):
        starts = evaluation.earlier_chats(encoder, earlier, seed)
        table.append(Line("problems, any phrasing", earlier, leads(model, some, starts)))
    return table


def _tasks(model: Qwen3ForCausalLM, encoder: Encoder, seed: int, count: int) -> list[Line]:
    """Measure the other skills and what is declined."""
    return [
        Line(task, 0, leads(model, encoded(encoder, evaluation.task_turns(task, count, seed))))
        for task in evaluation.TASKS
    ]


def _tools(model: Qwen3ForCausalLM, encoder: Encoder, seed: int) -> list[Line]:
    """Measure unseen JSON, and with functions: unseen calls, what is said about results, and what needs no call."""
    rows = {
        f"calls: {kind}": encoded(encoder, evaluation.call_turns(kind, CALLS, seed)) for kind in tool_questions.KINDS
    }
    rows["answers about results"] = evaluation.result_rows(encoder, CALLS, seed)
    rows["no call needed"] = encoded(encoder, evaluation.plain_turns(CALLS, seed))
    json_rows = encoded(encoder, evaluation.json_turns(CALLS, seed))
    table = [Line("unseen JSON", 0, leads(model, json_rows))]
    for earlier in (0, 1500):
        starts = evaluation.earlier_tool_chats(encoder, earlier, seed)
        table += [Line(task, earlier, leads(model, asked, starts)) for task, asked in rows.items()]
    return table


def share(values: list[bool]) -> float:
    """Return the share of true values in percent."""
    return 100.0 * sum(values) / len(values)


def format_table(table: list[Line]) -> str:
    """Lay the table out as Markdown."""
    head = "| Task | Tokens of earlier chat | Questions | Exactly right | Least lead |\n|---|---:|---:|---:|---:|\n"
    return head + "".join(
        f"| {line.task} | {line.earlier:,} | {len(line.leads):,} | {share([lead > 0 for lead in line.leads]):.2f} %"
        f" | {min(line.leads):.2f} |\n"
        for line in table
    )
