"""Measure P99, the inter-token latency of running streams while a long prompt arrives.

    python benchmarks/compare_latency.py URL --vocab-size N --seed 0 --out FILE

8 streams run; when each has 16 tokens, a prompt of 2,048 tokens is sent. Only gaps between tokens of the streams count
that overlap the time until the long prompt's first token; later ones would dilute the result.

    stream    |  |  |  |        |          |  |  |
    long              send -------- first token
    counted            [---)[--------)[-----)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from pypto_serving.bench.client import find_model, open_http
from pypto_serving.bench.datasets import RandomData, Vocabulary
from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import Target
from pypto_serving.bench.replies import StreamParser
from pypto_serving.bench.runner import watch_client

STREAMS, PROMPT, OUTPUT = 8, 128, 128
RUNNING_TOKENS = 16
LONG_PROMPT, LONG_OUTPUT = 2048, 2
TOKENS = (STREAMS + 1) * PROMPT + STREAMS * OUTPUT + LONG_PROMPT
"""Tokens of all prompts and answers, except a few."""


def overlapping_gaps_s(record: RequestRecord, start_s: float, end_s: float) -> list[float]:
    """Return the gaps between tokens of a stream that overlap [start_s, end_s), in seconds on the record's clock."""
    arrivals = record.start_s + np.cumsum([record.ttft_s, *record.itls_s])
    pairs = zip(arrivals[:-1].tolist(), arrivals[1:].tolist(), strict=True)
    return [after - before for before, after in pairs if after > start_s and before < end_s]


class Client:
    """Streams completions of token ids. Owns its connections."""

    def __init__(self, target: Target, model: str) -> None:
        self._target, self._model, self._http = target, model, open_http(target)

    async def stream(self, prompt: Sequence[int], output: int, running: asyncio.Event | None = None) -> RequestRecord:
        """Run one request to its end; set `running` at the RUNNING_TOKENS-th piece of text."""
        request = self._http.encode("POST", self._target.path, json.dumps(self._body(prompt, output)).encode())
        parser = StreamParser(time.perf_counter(), len(prompt))
        pieces = 0

        def feed(status: int, data: bytes) -> None:
            nonlocal pieces
            parser.feed(status, data, time.perf_counter())
            pieces += data.count(b"data:")
            if running is not None and pieces >= RUNNING_TOKENS:
                running.set()

        record = parser.finish(await self._http.exchange(request, feed))
        if running is not None:
            running.set()
        return record

    def _body(self, prompt: Sequence[int], output: int) -> dict[str, Any]:
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": self._model, "prompt": list(prompt), "max_tokens": output, **options}

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


async def measure(url: str, vocab_size: int, seed: int) -> dict[str, Any]:
    """Run once. Keys are those of `bench serve` where the meaning is the same."""
    target = Target(base_url=url)
    client = Client(target, (await find_model(target)).id)
    vocabulary = Vocabulary.of_size(vocab_size)
    short = RandomData(input_len=PROMPT, output_len=OUTPUT).prompts(STREAMS + 1, seed, vocabulary)
    long = RandomData(input_len=LONG_PROMPT).prompts(1, seed + 1_000_000, vocabulary)[0]
    contents = [list(map(int, prompt.content)) for prompt in (*short, long)]  # type: ignore[arg-type]
    await client.stream(contents[STREAMS], 8)
    async with watch_client() as load, asyncio.TaskGroup() as group:
        events = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [
            group.create_task(client.stream(content, OUTPUT, event))
            for content, event in zip(contents, events, strict=False)
        ]
        await asyncio.gather(*(event.wait() for event in events))
        late = await client.stream(contents[-1], LONG_OUTPUT)
    client.close()
    records = [task.result() for task in tasks]
    end_s = late.start_s + late.ttft_s
    gaps_ms = [1e3 * gap for record in records for gap in overlapping_gaps_s(record, late.start_s, end_s)]
    tokens = sum(record.output_tokens for record in (*records, late))
    return {
        "failed": sum(bool(record.error) for record in (*records, late)),
        "errors": [record.error for record in (*records, late) if record.error],
        "total_output_tokens": tokens,
        "p99_itl_ms": float(np.percentile(gaps_ms, 99)) if gaps_ms else None,
        "median_itl_ms": float(np.median(gaps_ms)) if gaps_ms else None,
        "gaps_ms": gaps_ms,
        "long_ttft_ms": 1e3 * late.ttft_s,
        **load.to_result(),
    }


def main(
    url: str,
    vocab_size: Annotated[int, typer.Option(help="Random token ids are drawn below this.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
) -> None:
    """Measure once."""
    out.write_text(json.dumps(asyncio.run(measure(url, vocab_size, seed))) + "\n")


if __name__ == "__main__":
    typer.run(main)
