"""Read calls that write each parameter within tags of its own, as Qwen3-Coder and DeepSeek V4 do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pypto_serving.api.chat.parsers.json_calls import (
    BracketScanner,
    json_type,
    loosened,
    may_call,
    read_head,
)
from pypto_serving.api.chat.parsers.recovery import near, slipped, without_slip
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Tools, drop_if, meets, past_space, to_json

MAX_TAG, _KEPT = 512, 128
"""Characters of a tag with a name; characters of a text that are kept back, since its end may be wrong."""
_NULL = re.compile(r"null|None|\{\}")
_NOT_PLAIN = re.compile(r"""["'{}\[\]\x00-\x1f]""")
_KINDS: Mapping[type | None, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    dict: ("object",),
    list: ("array",),
    str: ("text",),
}
ANY_TYPE = [kind for kinds in _KINDS.values() for kind in kinds]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a form.

    - `call` and `parameter` match a tag: its first word, `words` where it is right, and the name. The tag of a
      parameter may tell with "true" that the value is a text; else the types of the tool's parameters do.
    - `ends` are those of a parameter, a call, and of several calls; `starts` begin what may follow a call.
    """

    call: re.Pattern[str]
    parameter: re.Pattern[str]
    words: tuple[str, str]
    ends: tuple[str, str, str]
    starts: tuple[str, ...]
    values_have_lines: bool

    def read(self, scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
        """Read a call up to its end."""
        head = yield from self._read_tag(scanner, self.call, self.words[0])
        if head is None or not may_call(head[2], None if any_name and head[1] == self.words[0] else tools):
            return False
        scanner.call(head[2])
        types, given, separator = tools.get(head[2], {}), list[str](), "{"
        yield from self._drop_null(scanner)
        while (tag := (yield from self._read_tag(scanner, self.parameter, self.words[1]))) is not None:
            odd = tag[1] != self.words[1] or not tag[2].isprintable() or _NOT_PLAIN.search(tag[2])
            if odd and tag[2] not in types and not scanner.exact:
                return False
            given.append(tag[2])
            scanner.arguments(f"{separator}{to_json(tag[2])}: ")
            separator = ", "
            if tag.re.groups == 2:
                kinds, is_text = types.get(tag[2], ()), all(kind == "string" for kind in types.get(tag[2], ()))
            elif (is_text := tag[3].lower() == "true") or tag[3].lower() == "false":
                kinds = ANY_TYPE
            else:
                return False
            others = [name for name in types if name not in given] if types else None
            read = self._read_text if is_text else self._read_value
            if not (yield from read(scanner, kinds, others)):
                return False
            while (yield from self._drop_near(scanner, self.ends[0])):
                pass
        scanner.arguments(separator.strip(", ") + "}")
        return (yield from self._call_ends(scanner))

    def _read_tag(self, scanner: OutputScanner, tag: re.Pattern[str], word: str) -> Steps[re.Match[str] | None]:
        """Consume a tag, also where it comes twice."""
        at = yield from past_space(scanner)
        if not scanner.text.startswith("<", at):
            return None
        found = yield from read_head(scanner, at, tag, ">", MAX_TAG)
        if found is None or slipped(found[1], word) not in (len(word), len(found[1])):
            return None
        scanner.drop(found.end())
        while (yield from drop_if(scanner, found[0])):
            pass
        return found

    def _drop_null(self, scanner: OutputScanner) -> Steps[None]:
        """Consume a word that stands for no arguments."""
        at = yield from past_space(scanner)
        while len(scanner.text) < at + 4 and not scanner.ended:
            yield
        if found := _NULL.match(scanner.text, at):
            scanner.drop(found.end())

    def _drop_near(self, scanner: OutputScanner, mark: str) -> Steps[bool]:
        at = yield from past_space(scanner)
        after = yield from near(scanner, at, mark)
        scanner.drop(max(0, after))
        return after >= 0

    def _call_ends(self, scanner: OutputScanner) -> Steps[bool]:
        """Tell whether the call ends: with a mark, or before the next call."""
        at = yield from past_space(scanner)
        for start in self.starts:
            if (yield from meets(scanner, at, start)):
                return True
        for end in self.ends[1:]:
            if (yield from near(scanner, at, end)) >= 0:
                return True
        return False

    def _is_last(self, scanner: OutputScanner, at: int) -> Steps[bool]:
        """Tell whether at `at` nothing follows but ends, and the next call or the end of the output."""
        for mark in (*self.ends[1:], *self.starts):
            at = yield from past_space(scanner, at)
            if mark[-1] == ">":
                at = max(at, (yield from near(scanner, at, mark)))
        at = yield from past_space(scanner, at)
        return at == len(scanner.text) or (yield from read_head(scanner, at, self.call, ">", MAX_TAG)) is not None

    def _read_text(self, scanner: OutputScanner, types: Sequence[str], others: Sequence[str] | None) -> Steps[bool]:
        """Give out a text as it comes, but for the characters that may belong to its end."""
        scanner.arguments('"')
        whole = yield from self._read_until_end(scanner, others, scanner.quote)
        scanner.arguments('"' if whole else "")
        return whole

    def _read_value(self, scanner: OutputScanner, types: Sequence[str], others: Sequence[str] | None) -> Steps[bool]:
        """Give out a value that may have any of `types`. JSON may hold the marks that end values in its strings."""
        begin = yield from past_space(scanner)
        opens = "{" * ("object" in types) + "[" * ("array" in types) + '"' * ("text" in types)
        if scanner.text[begin : begin + 1] in tuple(opens):
            brackets = BracketScanner(begin)
            while not brackets.advance(scanner.text) and not scanner.ended:
                yield
            value = loosened(scanner.text[begin : brackets.at]) if brackets.done else None
            end = yield from past_space(scanner, brackets.at)
            if value is not None and scanner.text.startswith("<", end):
                scanner.arguments(value)
                scanner.drop(end)
                return True
        given: list[str] = []

        def keep(count: int) -> None:
            given.append(scanner.text[:count])
            scanner.drop(count)

        whole = yield from self._read_until_end(scanner, others, keep)
        value = as_json("".join(given), types) if whole else None
        scanner.arguments("".join(given) if value is None else value)
        return value is not None

    def _read_until_end(
        self, scanner: OutputScanner, others: Sequence[str] | None, give: Callable[[int], None]
    ) -> Steps[bool]:
        """Consume a value and its end: `give` what belongs to it.

        Without a mark it ends where the tag of one of `others` stands, or where the call ends.
        """
        if self.values_have_lines and (yield from meets(scanner, 0, "\n")):
            scanner.drop(1)
        line, at = "\n" * self.values_have_lines, 0
        sought = re.compile("|".join(map(re.escape, (self.ends[0], self.ends[1], f"<{self.words[1]}"))))
        while True:
            found = sought.search(scanner.text, at)
            if found is None:
                count = len(scanner.text) - (0 if scanner.ended else min(_KEPT, len(scanner.text)))
                give(count)
                at = max(0, at - count)
                if scanner.ended:
                    return False
                yield
                continue
            at = found.end()
            if found[0] == self.ends[0]:
                break
            if scanner.exact:
                continue
            if found[0] == self.ends[1]:
                ends = yield from self._is_last(scanner, at)
            else:
                tag = yield from read_head(scanner, found.start(), self.parameter, ">", MAX_TAG)
                ends = tag is not None and (others is None or tag[2] in others)
            if ends:
                break
        value = scanner.text[: found.start()]
        if found[0] != self.ends[0]:
            bare = without_slip(value.rstrip(), self.ends[0])
            value, line = value if bare == value.rstrip() else bare, "\n"
        value = value.removesuffix(line)
        give(len(value))
        scanner.drop(found.start() - len(value) + len(self.ends[0]) * (found[0] == self.ends[0]))
        return True


def as_json(text: str, types: Sequence[str]) -> str | None:
    """Write the value of a parameter that may have any of `types`. Other words are texts; None for what is broken."""
    word = loosened(text)
    kinds = _KINDS.get(json_type(word), ()) if word is not None else ()
    if word is not None and (any(kind in types for kind in kinds) or (word == "null" and "string" not in types)):
        return word
    return to_json(text) if "string" in types or not _NOT_PLAIN.search(text.strip()) else None
