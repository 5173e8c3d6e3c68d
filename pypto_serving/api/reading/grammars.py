"""Find out which grammars compile, one after the other, in a process that does nothing else."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, defaultdict
from time import monotonic
from typing import Any

import msgspec

from pypto_serving.api.reading.process import ReaderProcess, TooLargeError, TooSlowError
from pypto_serving.api.reading.turns import Turns
from pypto_serving.api.reading.wire import GRAMMAR_ANSWERS, Compiles, Fault, GrammarStart, Refusal, RefusedError
from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar

logger = logging.getLogger("pypto_serving.api")

COMPILE_S = 2.0
"""CPU time to compile a grammar. Workers compile it again."""
REMEMBERED = 1024
"""Grammars that are known as refused, and as many that are known to compile."""
MAX_ACCOUNTS = 8192
"""Hosts and connections whose time is counted; beyond it, counting begins anew."""

Client = tuple[str, int] | None
"""The address of a connection's other end."""


class Grammars:
    """Owns the reader of grammars, which starts when the first one comes. Used in one event loop.

    It serves those next whose host, and then whose connection, has had the least of its time since anybody had to wait.
    """

    def __init__(self, max_waiting: int) -> None:
        self.process = ReaderProcess("pypto_serving.api.reading.grammar_reader", GrammarStart, GRAMMAR_ANSWERS)
        self.turns = Turns[Client](max_waiting, self._spent_by, "grammars wait to be compiled")
        self._spent: defaultdict[object, float] = defaultdict(float)
        self._known = _Known()

    async def check(self, grammar: Grammar, field: str, client: Client) -> Grammar:
        """Return a grammar that compiles, in a syntax that workers read.

        Raises RequestError that names `field`, and RuntimeError if the reader fails on it. A call that is cancelled
        before its turn costs nothing.
        """
        key = _key_of(grammar)
        try:
            if not self._known.compiles(key):
                grammar = await self.turns.run(client, lambda: self._compile(grammar, key, client))
        except RefusedError as error:
            raise RequestError(f"{field}: {error}", param=field, code=error.error_code) from None
        return grammar

    async def close(self) -> None:
        """End the process, whatever it does, for good."""
        await self.process.close()

    async def _compile(self, grammar: Grammar, key: bytes, client: Client) -> Grammar:
        """Compile a grammar at its turn, unless one before it was the same."""
        if self._known.compiles(key):
            return grammar
        started_s = monotonic()
        try:
            answer = await self._ask(grammar)
        finally:
            self._charge(client, monotonic() - started_s)
        if isinstance(answer, Fault):
            raise RuntimeError(f"the reader of grammars failed:\n{answer.traceback}")
        if isinstance(answer, Refusal):
            self._known.add(key, answer)
            raise RefusedError(answer)
        if answer.grammar is None:
            self._known.add(key)
        return answer.grammar or grammar

    async def _ask(self, grammar: Grammar) -> Compiles | Refusal | Fault:
        try:
            return await self.process.ask(0, msgspec.msgpack.encode(grammar), COMPILE_S)
        except TooSlowError as error:
            logger.error("a grammar was given up after %g s of CPU time", COMPILE_S)
            message = f"it took more than {COMPILE_S:g} s of CPU time to compile; send a simpler one"
            refusal = Refusal(400, message, "reading_timeout", None)
            if not error.of_itself:
                raise RefusedError(refusal) from None
            return refusal
        except TooLargeError:
            return Refusal(400, "it takes too much memory to compile; send a simpler one", TooLargeError.code, None)

    def _charge(self, client: Client, took_s: float) -> None:
        if not self.turns.num_waiting or len(self._spent) > MAX_ACCOUNTS:
            self._spent.clear()
        elif client is not None:
            self._spent[client] += took_s
            self._spent[client[0]] += took_s

    def _spent_by(self, client: Client) -> tuple[float, float]:
        return (0.0, 0.0) if client is None else (self._spent.get(client[0], 0.0), self._spent.get(client, 0.0))


class _Known:
    """Remembers what became of grammars, by their hash. The least recently used are forgotten."""

    def __init__(self) -> None:
        self._compiling: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, Refusal] = OrderedDict()

    def compiles(self, key: bytes) -> bool:
        """Whether a grammar is known to compile. Raises RefusedError if it is known not to."""
        if key in self._refused:
            self._refused.move_to_end(key)
            raise RefusedError(self._refused[key])
        if key in self._compiling:
            self._compiling.move_to_end(key)
            return True
        return False

    def add(self, key: bytes, refusal: Refusal | None = None) -> None:
        kept: OrderedDict[bytes, Any] = self._compiling if refusal is None else self._refused
        kept[key] = refusal
        if len(kept) > REMEMBERED:
            kept.popitem(last=False)


def _key_of(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.syntax}\n{grammar.text}".encode(), digest_size=16).digest()
