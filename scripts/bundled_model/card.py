"""The short model card that is stored next to the weights."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import Qwen3ForCausalLM

from .arithmetic import HELD_OUT_PERCENT, LARGEST

CARD = """\
# Pip, the bundled demo model

A chat model with {parameters:,} parameters ({size:.1f} MB in all) in the Qwen3 architecture: {layers}
layers, hidden size {hidden}, {heads} query and {kv_heads} key-value heads of {head_dim}, tied embeddings,
{positions:,} positions, bfloat16 weights. The tokenizer is a byte-level BPE of {vocabulary} ids in which
every digit is its own token; the chat format is ChatML. It shows that the engine works and lets tests
compare its answers; it is no use as an assistant.

## Training

`scripts/train_bundled_model.py` generates all the text, so there is no data set and no other licence. The
chats contain sums and differences of numbers from 0 to {largest} in many phrasings, counting, spelling
forwards and backwards, the order of letters, days and months, repeating, greetings, a name to remember, and much to
decline: negative or larger numbers, other operations, ranges and words beyond its skills, unknown subjects, odd input,
letters that repeat many times.
Some ask for JSON, and some offer functions. The questions that need a function, and those that ask for JSON, are
split by a hash of the reply: one in ten is never practised, and the table below asks only those.
Rows are 64 to {positions:,} tokens long. To train a model again:

    python scripts/train_bundled_model.py --out pypto_serving/assets/bundled

In the first three stages about {percent} % of the arithmetic problems, chosen by a hash of the problem, did not
occur in any phrasing, to see whether the model calculates or remembers: 99.8 % of 1,000 of them were right then.
The later stages practise every problem, and what goes badly more often, so that nothing is held out any more.

The seed fixes the data and the first weights, and threads do not change the result; other machines and library
versions may. A new run is meant to give an equivalent model and not the same bytes, and that has not been checked.
These weights went through the stages one after the other while data and code were being settled: each later stage
saw more kinds of questions than those before it, stages 4 and 5 were planned with 800 steps each, stage 7 was cut off
after 300 of its 450 steps, stages 4 to 7 looked for what goes badly in all phrasings, and those from the eighth on
followed a clock instead of counting their steps. Stage 18 went on from the mean of the three before it, and stage 19
from the mean of that mean and stage 18; the rate and shares of stage 18 were not kept, and those in the script are
guesses. Stage 19 did not look for what goes badly first. The weights are the mean of those after the last two stages.

## Functions and JSON

It knows two functions, in the Hermes form of Qwen3: `calculate(expression)` for what is beyond its own range, and
`get_time(city)`, where the city may be left out. `TOOLS` in `scripts/bundled_model/tools.py` has them as a request
names them. The template shows the model a signature such as `calculate(expression)` and leaves out types and
descriptions, which it could not read. Sums and differences of numbers from 0 to 99 it answers itself, also where it has
functions, and functions that it does not know it does not call.

Asked for JSON, it answers sums (`{{"a": 12, "b": 30, "result": 42}}`), counts, spelled words, and what a sentence says
about somebody's name, age and city, with other keys if the question names them; everything else as
`{{"answer": "..."}}`.

## Accuracy

Greedy decoding, bfloat16 weights; a reply counts only if it is exactly the expected one. An arithmetic reply restates
the problem, such as `37 + 45 = 82`: its last number is the result. The lead is that of the right token over the next
best, in logits, where it is least. torch computed this table; `tests/e2e/test_bundled_answers.py` asks the engine.

{results}
The engine, on its CPU kernels, gets all 20,000 questions `What is 37+45?` right, and all of `37+45` and `37 + 45 =`.
Known errors: the result of a sum inside JSON is often wrong, and `Spell 'apple' backwards. Answer in JSON.` is spelled
forwards. A reply that would not end is cut off after 512 tokens: of 8,820 requests to say, spell or count repeated
letters or words too long, 3 were.

To measure again: `python scripts/train_bundled_model.py --evaluate pypto_serving/assets/bundled`
"""


def write_card(model: Qwen3ForCausalLM, folder: Path, results: str) -> None:
    """Write README.md with the results of the evaluation."""
    config = json.loads((folder / "config.json").read_text())
    text = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()),
        size=sum(f.stat().st_size for f in folder.iterdir() if f.name != "README.md") / 1e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        positions=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        largest=LARGEST,
        percent=HELD_OUT_PERCENT,
        results=results,
    )
    (folder / "README.md").write_text(text)
