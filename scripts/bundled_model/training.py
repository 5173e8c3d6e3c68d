"""The training loop: full rows of chat, AdamW and Muon, short rows first and long rows later."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import DecoderConfig, Qwen3ForCausalLM

from .chats import Chat
from .practice import Practice, Turn
from .tokenizer import END, END_OF_TEXT, Encoder
from .tool_chats import ToolChat

MAX_POSITION = 4096
IGNORED = -100
Gradients = tuple[torch.Tensor, ...]
PIECE_TOKENS = 1024
SHORTEST_WITH_TOOLS = 256
TINY = {64: 3, 128: 6, 256: 2}
SHORT = {128: 7, 256: 3}
MEDIUM = {128: 5, 256: 3, 512: 2}
LONG = {128: 3, 256: 1, 512: 2, 1024: 2, 2048: 2, 4096: 1}
MIXED = {64: 3, 128: 5, 256: 2, 512: 1, 1024: 1, 2048: 2, 4096: 0.5}
MOSTLY_SHORT = {64: 3, 128: 5, 256: 2.5, 512: 1, 1024: 1, 2048: 1.5, 4096: 0.4}
FOR_TOOLS = {128: 3, 256: 4, 512: 2, 1024: 0.7, 2048: 0.6, 4096: 0.1}
BEHIND_CHATS = {128: 3, 256: 3.5, 512: 1.5, 1024: 0.6, 2048: 0.8, 4096: 0.05}
AVERAGED = 2
"""How many of the last stages are averaged: the mean is right where each is wrong now and then (arXiv:2203.05482)."""
Weights = dict[str, torch.Tensor]
TWO_FORMS = ("What is {a}{o}{b}?", "{a}{o}{b}")


@dataclass(frozen=True)
class Stage:
    """One stretch of the run, with fresh optimizers."""

    steps: int
    rate: float
    # From which share of the stage on, the share of arithmetic and the weights of the row lengths.
    phases: tuple[tuple[float, float, dict[int, float]], ...]
    # The last share of the stage, over which the rate falls to zero.
    cooldown: float = 0.0
    warmup: int = 100
    tokens_per_step: int = 4096
    weight_decay: float = 0.05
    # Which share of the turns goes over those that went badly; then held-out problems are practised too.
    again_share: float = 0.0
    # How many logits a right token has to lead by before its loss fades.
    margin: float = 0.0
    # The forms in which every problem is asked before the stage, to see which go badly.
    forms: tuple[str, ...] = ("What is {a}{o}{b}?",)
    # Which share of the rows that are long enough for it are chats with functions.
    tool_share: float = 0.0


def _with_tools(
    steps: int,
    rate: float,
    arithmetic: float,
    again: float,
    cooldown: float = 1.0,
    tool_share: float = 0.6,
    lengths: dict[int, float] = FOR_TOOLS,
) -> Stage:
    """Return a stage with functions and JSON, too."""
    phases = ((0.0, arithmetic, lengths),)
    return Stage(steps, rate, phases, cooldown, 20, 2048, 0.05, again, 3.0, TWO_FORMS, tool_share)


STAGES = (
    Stage(1000, 0.003, ((0.0, 0.65, SHORT), (0.64, 0.55, MEDIUM))),
    Stage(1200, 0.0025, ((0.0, 0.50, MEDIUM), (0.65, 0.45, LONG)), cooldown=0.75),
    Stage(350, 0.0015, ((0.0, 0.55, MEDIUM), (0.4, 0.50, LONG)), cooldown=0.95, warmup=15),
    Stage(400, 0.001, ((0.0, 0.55, TINY), (0.8, 0.55, MIXED)), tokens_per_step=2048, again_share=0.3, margin=3.0),
    Stage(200, 0.001, ((0.0, 0.60, MIXED),), 0.0, 20, tokens_per_step=2048, again_share=0.3, margin=3.0),
    Stage(550, 0.001, ((0.0, 0.55, MIXED),), 1.0, 20, tokens_per_step=2048, again_share=0.3, margin=3.0),
    Stage(450, 0.0007, ((0.0, 0.45, MIXED),), 1.0, 20, tokens_per_step=2048, again_share=0.4, margin=3.0),
    Stage(489, 0.0005, ((0.0, 0.40, MOSTLY_SHORT),), 0.0, 20, tokens_per_step=2048, again_share=0.3, margin=3.0),
    Stage(563, 0.0005, ((0.0, 0.40, MOSTLY_SHORT),), 1.0, 10, tokens_per_step=2048, again_share=0.35, margin=3.0),
    _with_tools(538, 0.0013, 0.35, 0.25, cooldown=0.0),
    _with_tools(1321, 0.0013, 0.30, 0.25),
    _with_tools(580, 0.0008, 0.35, 0.30),
    _with_tools(2265, 0.0013, 0.35, 0.30),
    _with_tools(1769, 0.0007, 0.45, 0.40),
    _with_tools(2335, 0.0006, 0.40, 0.40, tool_share=0.45),
    _with_tools(1865, 0.0007, 0.45, 0.40, tool_share=0.45),
    _with_tools(1122, 0.0005, 0.55, 0.45, tool_share=0.45),
    _with_tools(710, 0.0005, 0.55, 0.45, tool_share=0.45, lengths=BEHIND_CHATS),
    _with_tools(4538, 0.0008, 0.40, 0.35, tool_share=0.45, lengths=BEHIND_CHATS),
    _with_tools(2646, 0.0005, 0.50, 0.45, tool_share=0.45, lengths=BEHIND_CHATS),
)


def new_model(vocabulary: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """Create the untrained model."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[END_OF_TEXT],
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


class Row(NamedTuple):
    """Ids of one chat, the labels of those to be learnt, and where its turns begin and end."""

    ids: list[int]
    labels: list[int]
    turns: list[tuple[Turn, int, int]]


def chat_row(encoder: Encoder, chat: Chat, length: int) -> Row:
    """Return exactly `length` ids of the chat, cut off at the end."""
    system = chat.system_message()
    ids = encoder.message("system", system) if system else []
    row = Row(ids, [IGNORED] * len(ids), [])
    while len(ids) < length:
        turn = chat.next_turn()
        more, learnt = encoder.turn(turn.question, turn.reply)
        row.turns.append((turn, len(ids), len(ids) + len(more)))
        row.ids.extend(more)
        row.labels.extend(token if wanted else IGNORED for token, wanted in zip(more, learnt, strict=True))
    return Row(ids[:length], row.labels[:length], [turn for turn in row.turns if turn[2] <= length])


def batches(stage: Stage, encoder: Encoder, practice: Practice, seed: int) -> Iterator[list[Row]]:
    """Yield the rows of each step, all of one length; none is padded, so plain causal attention is right."""
    rng = random.Random(seed)
    for step in range(stage.steps):
        _, share, lengths = [phase for phase in stage.phases if step >= phase[0] * stage.steps][-1]
        length = rng.choices(list(lengths), list(lengths.values()))[0]
        count = max(1, stage.tokens_per_step // length)
        tool_share = stage.tool_share if length >= SHORTEST_WITH_TOOLS else 0.0
        kinds = (ToolChat if rng.random() < tool_share else Chat for _ in range(count))
        yield [chat_row(encoder, kind(rng, practice, share), length) for kind in kinds]


def optimizers(model: Qwen3ForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """Return one Muon per layer for its matrices, and AdamW for the embedding and the norms."""
    result: list[torch.optim.Optimizer] = []
    for layer in model.model.layers:
        matrices = [p for p in layer.parameters() if p.ndim == 2]
        result.append(
            torch.optim.Muon(
                matrices,
                lr=stage.rate,
                weight_decay=stage.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    result.append(torch.optim.AdamW(others, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.0))
    return result


def weights_of(model: Qwen3ForCausalLM) -> Weights:
    """Return a copy of the weights."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def mean(ends: Sequence[Weights]) -> Weights:
    """Return the mean of several models' weights."""
    return {name: torch.stack([each[name] for each in ends]).mean(0) for name in ends[0]}


def rate_factor(step: int, stage: Stage) -> float:
    """Warm up, stay level, then fall to zero along a cosine if the stage has a cooldown."""
    factor = min(1.0, (step + 1) / stage.warmup)
    remaining = stage.steps - step
    cooldown = stage.cooldown * stage.steps
    return factor if remaining >= cooldown else factor * (0.5 - 0.5 * math.cos(math.pi * remaining / cooldown))


def loss_of_lead(lead: float, margin: float) -> float:
    """Return about the loss of a reply that leads by so many logits."""
    return math.log1p(math.exp(min(margin - lead, 50.0)))


class GradientWorkers:
    """Computes the gradients of a step in small pieces, on threads that take the next piece when free.

    Each piece is computed by one thread and the pieces are added in a fixed order: the result depends neither
    on the number of threads nor on which of them is held up by other work on the machine.
    """

    def __init__(self, model: Qwen3ForCausalLM, threads: int):
        """Start the threads."""
        self.model = model
        self.parameters = list(model.parameters())
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def _piece(self, ids: torch.Tensor, labels: torch.Tensor, margin: float) -> tuple[torch.Tensor, Gradients]:
        """Return the loss of every token, zero where none is to be learnt, and the gradients of their sum."""
        wanted = functional.pad(labels[:, 1:] != IGNORED, (0, 1))
        right = labels[:, 1:][wanted[:, :-1]]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[wanted]).float()
        if margin:
            logits = logits.scatter_add(1, right[:, None], torch.full((len(right), 1), -margin))
        losses = functional.cross_entropy(logits, right, reduction="none")
        everywhere = torch.zeros(ids.shape).masked_scatter(wanted.roll(1, 1), losses.detach())
        return everywhere, torch.autograd.grad(losses.sum(), self.parameters)

    def backward(self, ids: torch.Tensor, labels: torch.Tensor, margin: float) -> torch.Tensor:
        """Set the gradients of the parameters; return the loss of every token."""
        rows = max(1, PIECE_TOKENS // ids.shape[1])
        batch = zip(ids.split(rows), labels.split(rows), strict=True)
        pieces = list(self.pool.map(lambda piece: self._piece(*piece, margin), batch))
        count = (labels[:, 1:] != IGNORED).sum().item()
        for place, parameter in enumerate(self.parameters):
            parameter.grad = sum(gradients[place] for _, gradients in pieces) / count
        return torch.cat([losses for losses, _ in pieces])

    def step(self, group: list[torch.optim.Optimizer]) -> None:
        """Let every optimizer take its step."""
        list(self.pool.map(lambda optimizer: optimizer.step(), group))


def train(
    workers: GradientWorkers,
    encoder: Encoder,
    stage: Stage,
    practice: Practice,
    seed: int,
    every: int,
    report: Callable[[], str],
) -> None:
    """Train the model in place, calling `report` every so many steps and at the end."""
    model = workers.model
    group = optimizers(model, stage)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, stage)) for o in group]
    model.train()
    average = 0.0
    with tqdm(total=stage.steps, unit="step", mininterval=5) as bar:
        for step, rows in enumerate(batches(stage, encoder, practice, seed), 1):
            labels = torch.tensor([row.labels for row in rows])
            losses = workers.backward(torch.tensor([row.ids for row in rows]), labels, stage.margin)
            for row, values in zip(rows, losses, strict=True):
                for turn, start, end in row.turns:
                    practice.saw(turn, values[start:end].max().item())
            loss = losses.sum().item() / (labels != IGNORED).sum().item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            workers.step(group)
            for schedule in schedules:
                schedule.step()
            average = loss if step == 1 else 0.95 * average + 0.05 * loss
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
            bar.update()
            if step % every == 0 or step == stage.steps:
                model.eval()
                bar.write(f"step {step}  loss {average:.4f}  {report()}")
                model.train()
