"""`complete`, piped: with a model of its own, and with a running server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pypto_serving import LLM, SamplingParams
from pypto_serving.errors import RequestError
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

OPTIONS = ("--max-model-len", "256")
LINES = "What is 1 + 2?\n/set max_tokens 4\nWhat is 1 + 2?\n"


def complete(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypto_serving", "complete", *arguments]
    return subprocess.run(command, input=LINES, capture_output=True, text=True, timeout=120)


def test_lines_are_continued_the_same_here_and_by_a_server() -> None:
    here = complete(*OPTIONS, "--max-tokens", "12")
    with Server(*OPTIONS) as server:
        there = complete("--url", server.url, "--max-tokens", "12")
        assert server.metric("vllm:generation_tokens_total") == 16
    assert (here.returncode, there.returncode) == (0, 0), here.stderr + there.stderr
    assert here.stdout == there.stdout and here.stderr == there.stderr == "max_tokens 4\n"
    long, short = here.stdout.split("\n", 1)[0], here.stdout.rstrip("\n").rsplit("\n", 1)[-1]
    assert len(long) > 4 and short


def test_a_stream_is_what_comes_at_once() -> None:
    with LLM(max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (whole,) = llm.generate("What is 1 + 2?", params)
        stream = llm.stream("What is 1 + 2?", params)
        pieces = []
        while True:
            try:
                pieces.append(next(stream).text)
            except StopIteration as end:
                usage = end.value
                break
        assert "".join(pieces) == whole.outputs[0].text and len(pieces) > 1
        assert (usage.num_output_tokens, usage.num_prompt_tokens) == (20, len(whole.prompt_token_ids))
        with pytest.raises(RequestError, match="n is 2, but a stream is one answer"):
            next(llm.stream("x", SamplingParams(n=2)))
