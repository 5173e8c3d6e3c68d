"""Chats in which the model may call functions."""

from __future__ import annotations

import random

from . import refusals, tool_questions
from .chats import Chat
from .practice import Practice, Turn
from .tools import TOOLS, calls_text, signature, system_text
from .words import WORDS, any_word

SIGNATURES = {tool["function"]["name"]: signature(tool) for tool in TOOLS}
UNKNOWN_FUNCTIONS = [
    "get_weather(city)",
    "get_weather(location, unit)",
    "search(query)",
    "web_search(query, limit)",
    "send_email(to, subject, body)",
    "translate(text, language)",
    "get_stock_price(symbol)",
    "read_file(path)",
    "run_code(code)",
    "get_user()",
]
CALL_SHARE = 0.65
TWO_SHARE = 0.12


def choose_tools(rng: random.Random) -> list[str]:
    """Return the signatures of a chat, mostly those that the model knows, at times others with them or alone."""
    known = rng.choices([["calculate", "get_time"], ["calculate"], ["get_time"], []], [10, 5, 3, 1])[0]
    others = rng.sample(UNKNOWN_FUNCTIONS, rng.choice([1, 1, 2])) if not known or rng.random() < 0.2 else []
    if others and rng.random() < 0.4:
        others[0] = f"{any_word(rng)}_{rng.choice(WORDS)}({rng.choice(WORDS)})"
    chosen = [*(SIGNATURES[name] for name in known), *others]
    rng.shuffle(chosen)
    return chosen


class ToolChat(Chat):
    """A chat with functions: most questions need them, the others are answered as ever."""

    def __init__(
        self, rng: random.Random, practice: Practice, arithmetic_share: float, signatures: list[str] | None = None
    ):
        """Offer the functions of these signatures, or choose some."""
        super().__init__(rng, practice, arithmetic_share)
        self.signatures = signatures or choose_tools(rng)
        self.known = [name for name, line in SIGNATURES.items() if line in self.signatures]
        self.answer: Turn | None = None

    def system_message(self) -> str:
        """Return the functions, behind a system message in some chats."""
        return system_text(super().system_message(), self.signatures)

    def next_turn(self) -> Turn:
        """Return the next question, or the results of the calls just made."""
        if self.answer:
            turn, self.answer = self.answer, None
        elif self.known and self.rng.random() < CALL_SHARE:
            turn = self._call()
        else:
            turn = self.plain_turn()
        self.last_reply, self.last_problem = turn.reply, turn.problem
        return turn

    def plain_turn(self) -> Turn:
        """Return a question that needs no function."""
        turn = self._new_turn()
        while self._needs_a_call(turn):
            turn = self._new_turn()
        return turn

    def _call(self) -> Turn:
        """Ask for a call, and keep what will be said about its result."""
        rng = self.rng
        two = len(self.known) == len(SIGNATURES) and rng.random() < TWO_SHARE
        asked = tool_questions.ask(rng, tool_questions.TWO if two else rng.choice(self.known))
        self.answer = Turn(*tool_questions.respond(rng, asked.calls), alone=False)
        return Turn(asked.question, calls_text(asked.calls), alone=False)

    def _needs_a_call(self, turn: Turn) -> bool:
        """Say whether a question that is declined without functions should not be declined here."""
        if turn.reply == refusals.ONLY_SMALL:
            return "calculate" in self.known
        about_time = "time" in turn.question.lower() or "late" in turn.question.lower()
        return turn.reply == refusals.UNKNOWN and about_time and "get_time" in self.known
