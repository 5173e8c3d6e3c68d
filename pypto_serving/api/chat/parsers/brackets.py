"""Find where bracketed text ends while it comes in pieces."""

from __future__ import annotations

import re

_STRING_END = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}
_JSON = re.compile(r'["{}\[\]]|[^\s\w:,.+\-]')
_PYTHON = re.compile(r"""["'(){}\[\]]""")


class BracketScanner:
    """Find the end of a value that begins with a bracket, counting brackets outside of strings.

    `at` is how far the text was read: with `done` the end of the value, else everything before it is certain. `depth`
    is the number of open brackets. A character that JSON has in strings only is `broken`: the value ends before it.
    """

    def __init__(self, at: int = 0, depth: int = 0, python: bool = False) -> None:
        self.at = at
        self.done = self.broken = False
        self._depth = depth
        self._outside = _PYTHON if python else _JSON
        self._quote = ""

    def advance(self, text: str) -> bool:
        """Read on in `text`, which begins as it did before; return `done`."""
        while not self.done:
            found = (_STRING_END[self._quote] if self._quote else self._outside).search(text, self.at)
            if found is None:
                self.at = len(text) - (1 if self._quote and text.endswith("\\", self.at) else 0)
                break
            self._meet(found)
        return self.done

    def _meet(self, found: re.Match[str]) -> None:
        char = found[0]
        self.at = found.end()
        if self._quote:
            self._quote = self._quote if char != self._quote else ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            self.done = self._depth <= 0
        else:
            self.at = found.start()
            self.done = self.broken = True
