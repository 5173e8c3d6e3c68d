"""Find out which grammars compile, in processes that do nothing else."""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from pypto_serving.api.reading.known import Known, key_of
from pypto_serving.api.reading.lane import Client, Lane
from pypto_serving.api.reading.process import TooLargeError, TooSlowError
from pypto_serving.api.reading.wire import Compiles, Refusal, RefusedError
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar, Guide

logger = logging.getLogger("pypto_serving.api")

COMPILE_S = 2.0
"""CPU time to compile a grammar. Workers compile it again."""
LANES_S = (0.02, 0.2, COMPILE_S)
"""CPU time that a grammar may take in each lane. Most take a few milliseconds."""


class Grammars:
    """Owns the lanes that grammars go through, and remembers what became of them. Used in one event loop.

    All begin in the quickest lane; what takes too long there is compiled anew in the next one. So however many take
    long, and whoever sends them, a quick one waits for 20 ms of each that came before it.
    """

    def __init__(self, max_waiting: int) -> None:
        self.lanes = [Lane(allowed_s, max_waiting) for allowed_s in LANES_S]
        self._known = Known()

    async def check(self, guide: Guide, client: Client) -> Guide:
        """Return a guide whose grammar compiles, in a syntax that workers read.

        Raises RequestError that names its field, UnavailableError if the machine is too busy, and RuntimeError if a
        reader fails on it. A call that is cancelled before its turn costs nothing.
        """
        grammar = guide.grammar
        if grammar is None:
            return guide
        key = key_of(grammar)
        try:
            answer = self._known.find(key) or await self._find(grammar, key, client)
        except RefusedError as error:
            raise RequestError(f"{guide.field}: {error}", param=guide.field, code=error.error_code) from None
        return msgspec.structs.replace(guide, grammar=answer.grammar or grammar, compile_s=answer.compile_s)

    async def close(self) -> None:
        """End the processes, whatever they do, for good."""
        for lane in self.lanes:
            await lane.process.close()

    async def _find(self, grammar: Grammar, key: bytes, client: Client) -> Compiles:
        """Have a grammar compiled in the first lane whose time it does not exceed."""
        for lane in self.lanes[:-1]:
            try:
                return await lane.turns.run(client, partial(self._compile, lane, grammar, key, client))
            except TooSlowError:
                continue
        return await self.lanes[-1].turns.run(client, partial(self._compile, self.lanes[-1], grammar, key, client))

    async def _compile(self, lane: Lane, grammar: Grammar, key: bytes, client: Client) -> Compiles:
        """Compile a grammar at its turn, unless one before it was the same."""
        if (found := self._known.find(key)) is not None:
            return found
        try:
            answer = await lane.compile(grammar, client)
        except TooSlowError:
            if lane is not self.lanes[-1]:
                raise
            logger.error("a grammar was given up after %g s of CPU time", lane.allowed_s)
            message = f"it took more than {lane.allowed_s:g} s of CPU time to compile; send a simpler one"
            refusal = Refusal(400, message, TooSlowError.code, None)
        except TooLargeError:
            refusal = Refusal(400, "it takes too much memory to compile; send a simpler one", TooLargeError.code, None)
        except RefusedError as error:
            refusal = error.refusal
        else:
            self._known.compiles(key, answer)
            return answer
        self._known.is_refused(key, refusal)
        raise RefusedError(refusal)
