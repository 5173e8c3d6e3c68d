"""Measure structured outputs: microseconds of each mask, and tokens per second with a schema on every request.

Masks are those along valid JSON as the model's tokenizer writes it. Throughput takes turns with free requests of the
same length, at the same number of streams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pypto_serving import LLM, SamplingParams, StructuredOutputsParams
from pypto_serving.api.grammars.json_schema import prepare
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.guidance import Compiler
from pypto_serving.types.guide import Grammar, Guide
from pypto_serving.worker.reasoning import TokenTexts
from pypto_serving.worker.row_guide import RowGuide

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string", "maxLength": 40}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JANE = {
    "name": "Jane van der Berg",
    "age": 42,
    "email": "jane@example.org",
    "tags": ["red", "blue"],
    "address": {"street": "12 Long Acre, second floor", "city": "London"},
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "person": (PERSON, JANE),
    "people": ({"type": "array", "items": PERSON}, [JANE] * 5),
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, {"b": "text with some words"}], "c": JANE}),
    "choice of calls": (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": f"tool_{i}"}, "arguments": PERSON},
                    "required": ["name", "arguments"],
                }
                for i in range(20)
            ]
        },
        {"name": "tool_7", "arguments": JANE},
    ),
}


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(prepare(schema, json_options())))


def masks(model: Path, vocab_size: int, rounds: int) -> None:
    """Print what masks cost along each case, in a thread's own CPU time."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    started_s = time.process_time()
    compiler = Compiler.of(str(model), vocab_size, [0])
    prepared_s = time.process_time() - started_s
    print(f"tokenizer of {vocab_size} ids prepared in {prepared_s:.2f} s of CPU time\n")
    heads = "schema", "compile, ms", "tokens", "mask, µs: median", "mean", "p99", "whole row, µs: median"
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    every: list[float] = []
    for name, (schema, value) in CASES.items():
        grammar = grammar_of(schema)
        started_s = time.thread_time()
        compiler.compile(grammar)
        compile_ms = (time.thread_time() - started_s) * 1e3
        ids = tokenizer.encode(json.dumps(value), add_special_tokens=False).ids
        bits = np.zeros(compiler.num_words, np.uint32)
        fills, rows = [], []
        for _ in range(rounds):
            matcher = compiler.compile(grammar)
            guide = RowGuide(Guide(grammar), (0,), compiler.compile(grammar), bits, False, TokenTexts(compiler.tokens))
            guide.open()
            for token_id in ids:
                started_s = time.perf_counter()
                matcher.fill(bits)
                fills.append((time.perf_counter() - started_s) * 1e6)
                matcher.consume(token_id)
                started_s = time.perf_counter()
                guide.append(token_id)
                rows.append((time.perf_counter() - started_s) * 1e6)
        every += fills
        figures = statistics.median(fills), statistics.fmean(fills), np.percentile(fills, 99), statistics.median(rows)
        print(f"| {name} | {compile_ms:.2f} | {len(ids)} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    print(f"\nmedian of all masks: {statistics.median(every):.1f} µs (goal: at most 50)\n")


def throughput(model: Path, streams: int, tokens: int, rounds: int) -> None:
    """Print tokens per second of free requests, and of requests with a schema: one for all, and one for each."""
    endless = {"type": "array", "items": PERSON, "minItems": 1000}
    named = [{**endless, "title": f"schema {i}"} for i in range(streams)]
    kinds: dict[str, list[dict[str, Any] | None]] = {
        "free": [None] * streams,
        "one schema": [endless] * streams,
        "a schema each": list(named),
    }
    prompts = [[1 + i % 100] * 64 for i in range(streams)]
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with LLM(str(model), max_model_len=64 + tokens) as llm:
        for turn in range(rounds + 1):
            for kind, schemas in kinds.items():
                params = [params_of(schema, tokens, i) for i, schema in enumerate(schemas)]
                started_s = time.perf_counter()
                results = llm.generate(prompts, params)
                elapsed_s = time.perf_counter() - started_s
                count = sum(len(result.outputs[0].token_ids) for result in results)
                assert count == streams * tokens, "an output ended early"
                if turn:
                    speeds[kind].append(count / elapsed_s)
    free = statistics.median(speeds["free"])
    print(f"| {streams} streams of {tokens} tokens | tokens/s | of free |\n|---|---|---|")
    for kind, found in speeds.items():
        print(f"| {kind} | {statistics.median(found):.1f} | {statistics.median(found) / free:.3f} |")
    print("\ngoal: at least 0.95")


def params_of(schema: dict[str, Any] | None, tokens: int, seed: int) -> SamplingParams:
    structured = None if schema is None else StructuredOutputsParams(json=schema)
    return SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, structured_outputs=structured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("masks", "throughput"))
    arguments = parser.parse_args()
    if arguments.only != "throughput":
        masks(arguments.model, arguments.vocab, 10 * arguments.rounds)
    if arguments.only != "masks":
        throughput(arguments.model, arguments.streams, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
