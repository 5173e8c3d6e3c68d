"""The training loop: full rows of chat, AdamW and Muon, short rows first and long rows later."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from .chats import Chat
from .tokenizer import END, END_OF_TEXT, Encoder

MAX_POSITION = 4096
IGNORED = -100
PIECE_TOKENS = 1024
SHORT = {128: 7, 256: 3}
MEDIUM = {128: 5, 256: 3, 512: 2}
LONG = {128: 3, 256: 1, 512: 2, 1024: 2, 2048: 2, 4096: 1}


@dataclass(frozen=True)
class Stage:
    """One stretch of the run, with fresh optimizers."""

    steps: int
    rate: float
    # From which share of the stage on, the share of arithmetic and the weights of the row lengths.
    phases: tuple[tuple[float, float, dict[int, int]], ...]
    # The last share of the stage, over which the rate falls to zero.
    cooldown: float = 0.0
    warmup: int = 100
    tokens_per_step: int = 4096
    weight_decay: float = 0.05


STAGES = (
    Stage(1000, 0.003, ((0.0, 0.65, SHORT), (0.64, 0.55, MEDIUM))),
    Stage(1200, 0.0025, ((0.0, 0.50, MEDIUM), (0.65, 0.45, LONG)), cooldown=0.75),
    Stage(350, 0.0015, ((0.0, 0.55, MEDIUM), (0.4, 0.50, LONG)), cooldown=0.95, warmup=15),
)


def new_model(vocabulary: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """Create the untrained model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
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


def chat_row(rng: random.Random, encoder: Encoder, length: int, arithmetic_share: float) -> tuple[list[int], list[int]]:
    """Return exactly `length` ids of one chat, cut off at the end, and their labels."""
    chat = Chat(rng, arithmetic_share)
    system = chat.system_message()
    ids = encoder.message("system", system) if system else []
    labels = [IGNORED] * len(ids)
    while len(ids) < length:
        turn, learnt = encoder.turn(*chat.next_turn())
        ids += turn
        labels += [token if wanted else IGNORED for token, wanted in zip(turn, learnt, strict=True)]
    return ids[:length], labels[:length]


def batches(stage: Stage, encoder: Encoder, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ids and labels of each step; no row is padded, so plain causal attention is right."""
    rng = random.Random(seed)
    for step in range(stage.steps):
        _, share, lengths = [phase for phase in stage.phases if step >= phase[0] * stage.steps][-1]
        length = rng.choices(list(lengths), list(lengths.values()))[0]
        rows = [chat_row(rng, encoder, length, share) for _ in range(max(1, stage.tokens_per_step // length))]
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


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


def rate_factor(step: int, stage: Stage) -> float:
    """Warm up, stay level, then fall to zero along a cosine if the stage has a cooldown."""
    factor = min(1.0, (step + 1) / stage.warmup)
    remaining = stage.steps - step
    cooldown = stage.cooldown * stage.steps
    return factor if remaining >= cooldown else factor * (0.5 - 0.5 * math.cos(math.pi * remaining / cooldown))


class GradientWorkers:
    """Computes the gradients of a step in small pieces, on threads that take the next piece when free.

    Each piece is computed by one thread and the pieces are added in a fixed order: the result depends neither
    on the number of threads nor on which of them is held up by other work on the machine.
    """

    def __init__(self, model: Qwen3ForCausalLM, threads: int, compiled: bool):
        """Start the threads."""
        self.model = model
        self.parameters = list(model.parameters())
        self.loss = torch.compile(self._loss) if compiled else self._loss
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def _loss(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")

    def _piece(self, rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, tuple[torch.Tensor, ...]]:
        loss = self.loss(*rows)
        return loss.item(), torch.autograd.grad(loss, self.parameters)

    def backward(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Set the gradients of the parameters; return the mean loss."""
        rows = max(1, PIECE_TOKENS // ids.shape[1])
        pieces = list(self.pool.map(self._piece, zip(ids.split(rows), labels.split(rows), strict=True)))
        count = (labels[:, 1:] != IGNORED).sum().item()
        for place, parameter in enumerate(self.parameters):
            parameter.grad = sum(gradients[place] for _, gradients in pieces) / count
        return sum(loss for loss, _ in pieces) / count

    def step(self, group: list[torch.optim.Optimizer]) -> None:
        """Let every optimizer take its step."""
        list(self.pool.map(lambda optimizer: optimizer.step(), group))


def train(
    workers: GradientWorkers,
    encoder: Encoder,
    stage: Stage,
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
        for step, (ids, labels) in enumerate(batches(stage, encoder, seed), 1):
            loss = workers.backward(ids, labels)
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
