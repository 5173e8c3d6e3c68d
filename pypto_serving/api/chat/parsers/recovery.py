"""Read calls that a model wrote slightly wrong: the policy of all forms, and the steps that carry it out.

A call whose name and arguments can be recovered without guessing is a call. One that cannot is content, as it was
written. No call is made up, arguments are JSON, and pieces of marks are never content beside a call. How an output is
cut into pieces changes nothing.

- A mark may lack, have too much, or have wrong one character, or have two swapped (`slipped`). It may come twice. It
  may be missing where the next one says what it was: the outer one before the inner, an end before the next beginning.
- A value within tags ends where the next parameter begins, or the call ends, too.
- JSON may have control characters in strings, and constants and strings as Python writes them; arguments may be null.
- One brace too many or too few at the end of a call is forgiven if its arguments hold no object, in which the brace
  might belong elsewhere. All other quotes and brackets must be right.
- Where a call is cut, or what follows shows that it went on, it is content. So a call is held back until it is whole.
  Of one that is longer than MAX_HELD, the arguments come as they are generated. If it breaks off it stays a call,
  with the rest of its text as arguments, and the output does not end with the reason `tool_calls`.
- Where a grammar writes the calls (`exact`), only the marks that it writes begin one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pypto_serving.api.chat.parsers.scanner import (
    OutputScanner,
    Steps,
    Tools,
    end_calls,
    past_space,
    seek,
)

_GAPS = {first: re.compile(rf"\n{{0,2}}(?:[{re.escape(first)}]|\Z)") for first in ("<", "[", "<{")}
_TAGS = {
    "<": re.compile(r"<{1,2}[^\s<>]{0,40}>?"),
    "[": re.compile(r"\[{1,2}[^\s\[\]]{0,40}\]?"),
    "{": re.compile(r'\{\s{0,8}(?:"[^\s"]{0,5}"?)?'),
}
"""What stands between a gap and a call, by its first character: all of a tag, or the first key of an object."""
_GOES_ON = (",", ":", "}", "]", ")", '"', "'")
"""What follows a call only where the call was not whole."""


def slipped(text: str, mark: str) -> int:
    """Return how long the beginning of `text` is that is `mark`, maybe with one slip; -1 if it is none."""
    same = next((i for i, (a, b) in enumerate(zip(text, mark, strict=False)) if a != b), min(len(text), len(mark)))
    if same == len(mark):
        return same + text.startswith(mark[-1], same)
    if len(mark) < 5 and not same:
        return -1
    swapped = text[same : same + 2] == mark[same : same + 2][::-1]
    last = same == len(mark) - 1 and text[same + 1 : same + 2] not in ("", "\n", "<", "[")
    for more, less in (*[(2, 2)] * swapped, *[(1, 0)] * (same > 0), *[(1, 1)] * (not last), (0, 1)):
        rest = mark[same + less :]
        if len(text) >= same + more and text.startswith(rest, same + more):
            return same + more + len(rest)
    return -1


def without_slip(text: str, mark: str) -> str:
    """Return `text` without a `mark` with one slip at its end."""
    for length in (len(mark) + 1, len(mark), len(mark) - 1):
        if slipped(text[-length:], mark) == length <= len(text):
            return text[:-length]
    return text


def near(scanner: OutputScanner, at: int, mark: str) -> Steps[int]:
    """Return where `mark`, maybe with a slip, ends that begins at `at`; -1 if it does not."""
    while len(scanner.text) < at + len(mark) + 2 and not scanner.ended:
        yield
    return -1 if (length := slipped(scanner.text[at : at + len(mark) + 2], mark)) < 0 else at + length


@dataclass(frozen=True, slots=True)
class Markup:
    """How calls of a form stand in text.

    - `read` reads the call at the beginning of the scanner, maybe after white space; False if it cannot be read.
      It is told the tools, and whether it may name others: after a mark, if that cannot have taken letters of the name.
    - `starts` begin calls. So do `heads`, which belong to the call itself, and `loose_heads` unless `exact`: then the
      call must name a tool, and one of `ends` must follow.
    - `ends` follow a call, the last of them all calls after a mark.
    - `opener`: what a call begins with; `between` may stand between two after one mark.
    """

    read: Callable[[OutputScanner, Tools, bool], Steps[bool]]
    starts: tuple[str, ...]
    heads: tuple[str, ...] = ()
    loose_heads: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opener: str = ""
    between: str = ""

    def read_text(self, scanner: OutputScanner, tools: Tools) -> Steps[None]:
        """Read content and calls."""
        while (at := (yield from self._seek(scanner))) >= 0:
            mark = scanner.text[:at].strip() or None
            yield from self._read_calls(scanner, tools, at, mark, mark is None)

    def read_first(self, scanner: OutputScanner, tools: Tools) -> Steps[None]:
        """Read the calls without a mark at the beginning of the output, which name a tool."""
        yield from self._read_calls(scanner, tools, 0, None, False)

    def _read_calls(
        self, scanner: OutputScanner, tools: Tools, at: int, mark: str | None, needs_end: bool
    ) -> Steps[None]:
        """Read the calls at `at`, one after the other. What is no call is content, through its end."""
        after_call = scanner.num_calls > 0 and not scanner.said.strip()
        while True:
            scanner.begin()
            scanner.drop(at)
            found, closed = yield from self._read_call(scanner, tools, mark, needs_end)
            if not found:
                break
            scanner.keep()
            at = yield from past_space(scanner)
            if self.between and scanner.text.startswith(self.between, at):
                at = yield from past_space(scanner, at + len(self.between))
            if closed or not self.opener or not scanner.text.startswith(self.opener, at):
                yield from end_calls(scanner, (*self.starts, *self.heads))
                return
        if not scanner.undo():
            yield from seek(scanner, (*self.ends, *self.starts), scanner.argue)
            yield from self._drop_ends(scanner)
            return
        if mark is None and not needs_end:
            return
        begins = yield from past_space(scanner, at)
        is_call = self.opener and scanner.text.startswith(self.opener, begins)
        if mark and after_call and begins == len(scanner.text):  # an end that looks like a start
            scanner.drop(at)
            return
        if mark and self.ends and (empty := (yield from near(scanner, begins, self.ends[-1]))) >= 0:
            scanner.drop(empty)
            return
        scanner.say(at if mark else at + 1)
        if mark and is_call and self.ends:
            scanner.say(len((yield from seek(scanner, self.ends, scanner.say))))

    def _seek(self, scanner: OutputScanner) -> Steps[int]:
        """Give out the text before a call. Return where the mark of the call ends, or its head begins; -1 for none."""
        heads = self.heads if scanner.exact else self.heads + self.loose_heads
        firsts = "<{" if any(head[0] == "{" for head in heads) else self.starts[0][0]
        while True:
            found = _GAPS[firsts].search(scanner.text)
            assert found is not None
            scanner.say(found.start())
            gap = found.end() - found.start() - 1
            if not found[0].strip("\n"):
                if scanner.ended:
                    return -1
                yield
                continue
            tag = _TAGS[scanner.text[gap]].match(scanner.text, gap)
            assert tag is not None
            if tag.end() == len(scanner.text) and not scanner.ended and not tag[0].endswith((">", "]")):
                yield
                continue
            if self._is_start(tag[0], scanner.exact) and not (len(self.starts) > 1 and self._follows_slip(scanner)):
                return tag.end()
            bare = "".join(tag[0].split())
            if bare.startswith(heads) and not self._follows_slip(scanner):
                return gap
            scanner.say(gap + 1)

    def _is_start(self, tag: str, exact: bool) -> bool:
        near_one = not exact and tag not in self.ends and any(slipped(tag, mark) == len(tag) for mark in self.starts)
        return tag in self.starts or near_one

    def _follows_slip(self, scanner: OutputScanner) -> bool:
        """Tell whether the content ends with what may have been a start, so that a call would leave a piece of it."""
        said = scanner.said.rstrip()
        return any(without_slip(said, mark) != said for mark in self.starts)

    def _read_call(
        self, scanner: OutputScanner, tools: Tools, mark: str | None, needs_end: bool
    ) -> Steps[tuple[bool, bool]]:
        """Read a call and its ends; tell whether it is whole, and whether no other call follows its mark."""
        any_name = mark is not None and (bool(self.opener) or mark in self.starts)
        while mark is not None:  # a mark that came twice, or the one within it
            at = yield from past_space(scanner)
            tag = yield from self._tag(scanner, at)
            if not self._is_start(tag, scanner.exact):
                break
            any_name = any_name and (bool(self.opener) or tag in self.starts)
            scanner.drop(at + len(tag))
        if not (yield from self.read(scanner, tools, any_name)):
            return False, False
        ends = yield from self._drop_ends(scanner)
        at = yield from past_space(scanner)
        goes_on = scanner.text.startswith(_GOES_ON, at) and not scanner.exact
        return bool(ends) or not (goes_on or needs_end), bool(ends) and ends[-1] == self.ends[-1]

    def _drop_ends(self, scanner: OutputScanner) -> Steps[list[str]]:
        """Consume the marks that end a call, also where they come twice; return them."""
        found = []
        for end in self.ends:
            while True:
                at = yield from past_space(scanner)
                after = yield from near(scanner, at, end)
                if after < 0 or scanner.text.startswith(self.starts, at):
                    break
                scanner.drop(after)
                found.append(end)
        return found

    def _tag(self, scanner: OutputScanner, at: int) -> Steps[str]:
        while True:
            shape = _TAGS.get(scanner.text[at : at + 1])
            tag = None if shape is None else shape.match(scanner.text, at)
            if tag is None or tag.end() < len(scanner.text) or scanner.ended or tag[0].endswith((">", "]")):
                return "" if tag is None else tag[0]
            yield
