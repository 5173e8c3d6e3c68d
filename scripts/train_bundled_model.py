"""Train, save and evaluate the bundled demo model on text that this script generates.

    python scripts/train_bundled_model.py --out pypto_serving/assets/bundled
    python scripts/train_bundled_model.py --evaluate pypto_serving/assets/bundled

Training needs torch, transformers and tokenizers, and no data.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bundled_model import card, checkpoint, evaluation, scores, training
from bundled_model.arithmetic import PROBLEMS, all_problems
from bundled_model.practice import Practice, Turn
from bundled_model.tokenizer import Encoder, save_tokenizer, train_tokenizer


def train_and_save(options: argparse.Namespace) -> None:
    """Train a model, or go on with a saved one, and save it on the way and at the end."""
    folder = options.out
    if options.first_stage == 0:
        tokenizer = train_tokenizer(options.seed)
        model = training.new_model(tokenizer.get_vocab(), options.seed)
    else:
        model, tokenizer = checkpoint.load(folder)
    encoder = Encoder(tokenizer)
    turns = evaluation.encoded(encoder, evaluation.held_out_turns(200, options.seed))
    calls = evaluation.encoded(encoder, evaluation.call_turns("calculate", 100, options.seed))
    nothing_said = evaluation.earlier_tool_chats(encoder, 0, options.seed)
    said = evaluation.earlier_chats(encoder, 1000, options.seed)
    started = time.monotonic()

    def exact(rows: list[evaluation.Row], starts: evaluation.Starts = evaluation.NOTHING) -> float:
        return scores.share([lead > 0 for lead in evaluation.leads(model, rows, starts)])

    def report() -> str:
        save_tokenizer(tokenizer, folder, training.MAX_POSITION)
        checkpoint.save_model(model, folder)
        near, far = exact(turns), exact(turns[:40], said)
        parts = f"held-out {near:.1f} %, after 1,000 tokens {far:.1f} %, calls {exact(calls, nothing_said):.1f} %"
        return f"{parts}, {time.monotonic() - started:.0f} s"

    def practice(stage: training.Stage, seed: int) -> Practice:
        """Look which problems and tasks go badly, if the stage is about those."""
        if not stage.again_share:
            return Practice(all_problems(held_out=False))
        result = Practice(PROBLEMS, stage.again_share)
        turns = []
        for form in stage.forms:
            pairs = evaluation.every_problem(seed, form)
            turns += [Turn(*pair, problem) for pair, problem in zip(pairs, PROBLEMS, strict=True)]
        turns += [Turn(*pair) for task in evaluation.TASKS for pair in evaluation.task_turns(task, 200, seed)]
        leads = evaluation.leads(model, [encoder.turn(turn.question, turn.reply) for turn in turns])
        for turn, lead in zip(turns, leads, strict=True):
            result.saw(turn, training.loss_of_lead(lead, stage.margin))
        print(f"{sum(lead <= 0 for lead in leads)} of {len(turns)} turns wrong", flush=True)
        return result

    workers = training.GradientWorkers(model, options.threads)
    ends: list[training.Weights] = []
    for number, stage in enumerate(training.STAGES):
        if number >= options.first_stage:
            stage = dataclasses.replace(stage, steps=round(stage.steps * options.scale))
            seed = options.seed + number
            training.train(workers, encoder, stage, practice(stage, seed), seed, options.every, report)
            ends = [*ends, training.weights_of(model)][-training.AVERAGED :]
    model.load_state_dict(training.mean(ends))
    print(report(), flush=True)


def evaluate(folder: Path, count: int, seed: int, write_card: bool) -> str:
    """Return the accuracy and sample chats of a saved model as Markdown; put them on its card if wanted."""
    model, tokenizer = checkpoint.load(folder)
    encoder = Encoder(tokenizer)
    parts = [scores.format_table(scores.score_table(model, encoder, seed, count))]
    parts.append("```text\n" + "\n\n".join(checkpoint.transcripts(model, encoder)) + "\n```\n")
    results = "\n".join(parts)
    if write_card:
        card.write_card(model, folder, results)
    return results


def main() -> None:
    """Read the command line and do what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help="train a model and save it here")
    action.add_argument("--evaluate", type=Path, metavar="DIR", help="print the accuracy of a saved model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps, for a trial")
    parser.add_argument("--first-stage", type=int, default=0, help="go on from the model in DIR with this stage")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="questions per skill (default: %(default)s)")
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations (default: %(default)s)")
    parser.add_argument("--card", action="store_true", help="with --evaluate, also write the model card")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        print(evaluate(options.evaluate, options.count, options.seed, options.card))
    else:
        train_and_save(options)
        print(evaluate(options.out, options.count, options.seed, write_card=True))


if __name__ == "__main__":
    main()
