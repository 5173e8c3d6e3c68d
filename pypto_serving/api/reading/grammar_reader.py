"""Run the reader of grammars: `python -m pypto_serving.api.reading.grammar_reader FD`, its control pipe.

It imports little, since each grammar that takes too long ends it, and the next one waits until another has started.
"""

from __future__ import annotations

import functools
import sys

import msgspec

from pypto_serving.api.generation import schema_errors
from pypto_serving.api.reading.loop import limit_memory, run
from pypto_serving.api.reading.wire import Compiles, GrammarStart, Refusal
from pypto_serving.errors import EXIT_OK
from pypto_serving.guidance import GrammarError
from pypto_serving.ipc import Parent
from pypto_serving.types.guide import Grammar

REMEMBERED = 16
"""Grammars of which it is known what became of them."""


def answer(kind: int, raw: bytes) -> Compiles | Refusal:
    """Say whether a grammar compiles."""
    return compiled(msgspec.msgpack.decode(raw, type=Grammar))


@functools.lru_cache(REMEMBERED)
def compiled(grammar: Grammar) -> Compiles | Refusal:
    try:
        checked = schema_errors.checked(grammar)
    except GrammarError as error:
        return Refusal(error.status, str(error), error.error_code, None)
    return Compiles(None if checked == grammar else checked)


def main() -> int:
    start = Parent(int(sys.argv[1]), GrammarStart).start
    limit_memory()
    run(start.channel, answer)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
