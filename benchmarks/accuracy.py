"""Ask the bundled model 2,000 sums and differences in any phrasing, with weights of every format; print a table.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --only "bf16;w8a8;nvfp4" --count 500

Formats that `convert` writes are made by it, others by the tests, which round to nearest. Those of DeepSeek V4 are left
out: the bundled model is a Qwen3. Greedy, through the offline API. The goal for 8 bits is at most half a point below
bf16.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

REPOSITORY = Path(__file__).parent.parent
sys.path += [str(REPOSITORY), str(REPOSITORY / "scripts")]

from bundled_model.arithmetic import PROBLEMS, ask  # noqa: E402

from pypto_serving import LLM, SamplingParams  # noqa: E402
from pypto_serving.model.convert.conversion import convert  # noqa: E402
from pypto_serving.model.convert.encodings import W4A16, W8A8, Encoding, Mxfp4  # noqa: E402
from pypto_serving.model.registry import read_config  # noqa: E402
from pypto_serving.setup.locate import BUNDLED  # noqa: E402
from tests import quantised  # noqa: E402

Make = Callable[[Path], object]


def converted(encoding: Encoding) -> Make:
    return lambda folder: convert(BUNDLED, folder, encoding, lambda *_: None)


def rounded(format: str) -> Make:
    def make(folder: Path) -> None:
        shutil.copytree(BUNDLED, folder)
        quantised.quantise(folder, format)

    return make


FORMATS: dict[str, Make] = {
    "bf16": lambda folder: shutil.copytree(BUNDLED, folder),
    **{name: rounded(name) for name in quantised.FORMATS},
    "w8a8": converted(W8A8()),
    "mxfp4": converted(Mxfp4()),
    **{f"w4a16 g{size}": converted(W4A16(size)) for size in (32, 64, 128)},
}

SERVED: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in FORMATS},
    "w4a16 g32, head int8": ("w4a16 g32", {"head": "int8"}),
    "w4a16 g32, activations bf16": ("w4a16 g32", {"activations": "bf16"}),
    "bf16, head int8": ("bf16", {"head": "int8"}),
    **{f"{name}, KV int8": (name, {"kv_dtype": "int8"}) for name in ("bf16", "w8a8", "w4a16 g32")},
}
"""Formats by name, and options to serve them with."""


def wrong_answers(folder: Path, options: dict[str, str], questions: dict[str, str]) -> int:
    """Count the questions that are not answered as expected."""
    with LLM(folder, max_model_len=512, log_level="warning", **options) as model:
        params = SamplingParams(temperature=0, max_tokens=40)
        chats = [[{"role": "user", "content": question}] for question in questions]
        results = model.chat(chats, params, progress=False)
    return sum(result.outputs[0].text != reply for result, reply in zip(results, questions.values(), strict=True))


def main(
    count: Annotated[int, typer.Option(min=1, help="Questions of each format.")] = 2000,
    only: Annotated[str, typer.Option(help="Formats, separated by semicolons.")] = ";".join(SERVED),
) -> None:
    """Ask the same questions of every format."""
    rng = random.Random(0)
    questions = {ask(rng, problem): problem.reply for problem in rng.sample(PROBLEMS, count)}
    typer.echo("| format | bits per weight of linear layers | wrong | right |\n|---|---|---|---|")
    for name in only.split(";"):
        if name not in SERVED:
            raise typer.BadParameter(f"there is no format {name}; there are {'; '.join(SERVED)}")
        format, options = SERVED[name]
        with tempfile.TemporaryDirectory() as folder:
            FORMATS[format](path := Path(folder, "model"))
            contents = read_config(str(path)).contents()
            assert contents is not None
            bits = ", ".join(f"{form.bits_per_weight:.2f}" for form in contents.forms)
            wrong = wrong_answers(path, options, questions)
        typer.echo(f"| {name} | {bits} | {wrong} | {1 - wrong / len(questions):.2%} |")


if __name__ == "__main__":
    typer.run(main)
