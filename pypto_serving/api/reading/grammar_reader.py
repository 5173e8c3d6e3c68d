"""Run a reader of grammars: `python -m pypto_serving.api.reading.grammar_reader FD`, its control pipe.

Each grammar is compiled by a copy of it, so that one that takes too long costs the next one no start of a process.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import msgspec

from pypto_serving.api.grammars import schema_errors
from pypto_serving.api.reading.loop import apart, limit_memory, run
from pypto_serving.api.reading.wire import Compiles, GrammarStart, Refusal
from pypto_serving.errors import EXIT_OK
from pypto_serving.guidance import GrammarError
from pypto_serving.processes import Parent
from pypto_serving.types.guide import Grammar

WARMING = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}')
"""Compiled once before the first copy, so that each need not import and initialize what it takes."""


def answer(kind: int, raw: bytes) -> Compiles | Refusal:
    """Say whether a grammar compiles."""
    grammar, started_s = msgspec.msgpack.decode(raw, type=Grammar), time.process_time()
    try:
        checked = schema_errors.checked(grammar)
    except GrammarError as error:
        return Refusal(error.status, str(error), error.error_code, None)
    return Compiles(None if checked == grammar else checked, time.process_time() - started_s)


def main() -> int:
    start = Parent.of_module(GrammarStart, watches=False).start
    limit_memory()
    schema_errors.checked(WARMING)
    run(start.channel, partial(apart, answer))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
