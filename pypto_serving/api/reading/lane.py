"""Lane: a reader of grammars, and whose turn it is there."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic

import msgspec

from pypto_serving.api.reading.process import ReaderProcess
from pypto_serving.api.reading.turns import Turns
from pypto_serving.api.reading.wire import GRAMMAR_ANSWERS, Compiles, GrammarStart
from pypto_serving.types.guide import Grammar

MAX_ACCOUNTS = 8192
"""Hosts and connections whose time is counted; beyond it, counting begins anew."""

Client = tuple[str, int] | None
"""The address of a connection's other end."""


class Lane:
    """Owns a reader of grammars, which starts when the first one comes, and ends each after `allowed_s` of CPU time.

    Those are next whose host, and then whose connection, took the least of its time. Accounts start anew whenever
    nobody waits.
    """

    def __init__(self, allowed_s: float, max_waiting: int) -> None:
        self.allowed_s = allowed_s
        self.process: ReaderProcess[Compiles] = ReaderProcess(
            "pypto_serving.api.reading.grammar_reader", GrammarStart, GRAMMAR_ANSWERS
        )
        self.turns = Turns[Client](max_waiting, self._spent_by, "grammars wait to be compiled")
        self._spent: defaultdict[object, float] = defaultdict(float)

    async def compile(self, grammar: Grammar, client: Client) -> Compiles:
        """Have a grammar compiled at the client's turn, and count the time. Raises what ReaderProcess.ask raises."""
        started_s = monotonic()
        try:
            return await self.process.ask(0, msgspec.msgpack.encode(grammar), self.allowed_s)
        finally:
            self._charge(client, monotonic() - started_s)

    def _charge(self, client: Client, took_s: float) -> None:
        if not self.turns.num_waiting or len(self._spent) > MAX_ACCOUNTS:
            self._spent.clear()
        elif client is not None:
            self._spent[client] += took_s
            self._spent[client[0]] += took_s

    def _spent_by(self, client: Client) -> tuple[float, float]:
        return (0.0, 0.0) if client is None else (self._spent.get(client[0], 0.0), self._spent.get(client, 0.0))
