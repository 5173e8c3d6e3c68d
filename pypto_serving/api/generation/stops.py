"""Find stop strings in an output."""

from __future__ import annotations

from collections.abc import Sequence


class StopPatterns:
    """The stop strings of a request, longest first, with the tables that find them. Shared by all choices.

    `shown`: the string found stays in the text.
    """

    __slots__ = ("patterns", "shown")

    def __init__(self, stops: Sequence[str], shown: bool = False) -> None:
        self.shown = shown
        self.patterns = [(stop, _failure_table(stop)) for stop in sorted(stops, key=len, reverse=True)]


class StopStrings:
    """Find the first of several stop strings in a text that comes in pieces. Owned by one choice.

    The match that ends first wins; of several that end there, the longest. The pieces do not change the result. Text is
    held back only while it could still become a stop string. `matched` is the string found; later text is dropped.
    """

    __slots__ = ("_held", "_patterns", "_shown", "_states", "matched")

    def __init__(self, stops: StopPatterns) -> None:
        self._patterns, self._shown = stops.patterns, stops.shown
        self._states = [0] * len(self._patterns)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text; return the new text that cannot belong to a stop string, or any if those are shown.

        Without `may_end` a stop string that ends in `text` does not count; one that only begins there does.
        """
        if self.matched is not None:
            return ""
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            found = self._advance(char)
            if found is not None and may_end:
                self.matched = found
                return self._release(end if self._shown else end - len(found))
        return self._release(len(self._held) - (0 if self._shown else max(self._states, default=0)))

    def flush(self) -> str:
        """End the text; return what was held back."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _advance(self, char: str) -> str | None:
        """Move the automaton of each pattern (Knuth, Morris, Pratt 1977) by one character; return the pattern found."""
        states, found = self._states, None
        for i, (pattern, failure) in enumerate(self._patterns):
            state = states[i]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                found = found or pattern
                state = failure[-1]
            states[i] = state
        return found


def _failure_table(pattern: str) -> list[int]:
    """Return, for each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
