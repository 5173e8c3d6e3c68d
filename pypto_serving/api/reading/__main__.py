"""Run a reader of bodies: `python -m pypto_serving.api.reading FD`. FD is its end of the control pipe.

A copy of it reads the bodies, so that one that takes too long costs the next one no start of a process.
"""

from __future__ import annotations

import sys
from functools import partial

from pypto_serving.api.common.body import Answered, ReadBody
from pypto_serving.api.http.errors import describe
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.reading.bodies import ENDPOINTS, BodyStart
from pypto_serving.api.reading.loop import limit_memory, run_copies
from pypto_serving.api.reading.reader import BodyReader
from pypto_serving.api.reading.wire import Refusal
from pypto_serving.errors import EXIT_OK, PyptoError
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Parent


def answer(reader: BodyReader, kind: int, raw: bytes) -> ReadBody | Answered | Refusal:
    """Read one body."""
    try:
        return reader.read(ENDPOINTS[kind], raw)
    except PyptoError as error:
        return Refusal.of(describe(error))


def main() -> int:
    start = Parent.of_module(BodyStart, watches=False).start
    configure_logs("reader", "error", start.config.log_format)  # the server says the rest
    limit_memory()
    reader = BodyReader(Prompter.load(start.config, start.serving), start.serving)
    run_copies(start.channel, partial(answer, reader))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
