"""Patterns mean what ECMAScript says, also where Rust reads the same characters in another way."""

from __future__ import annotations

import json

import pytest

from pypto_serving.api.grammars.ecma import to_rust
from tests.api.generation.following import accepts, matcher_of

CASES: list[tuple[str, list[str], list[str]]] = [
    ("^.$", ["a", "é", "😀"], ["\r", "\u2028", "\n", "ab"]),
    (r"^\d\D$", ["1a", "1\u0663"], ["11", "\u0663a"]),
    (r"^\w\W$", ["_-", "aé"], ["ab", "é-"]),
    (r"^\s\S$", ["\u00a0a", "\ufeffa", "\t\u0085"], ["\u0085a", "a "]),
    (r"^[\s\d]+$", [" 1\u2003"], ["a", "\u0085"]),
    (r"^[^\d\s]$", ["a", "é"], ["1", " "]),
    (r"^[\w.-]+$", ["a.b-c_"], ["a b", "é"]),
    ("^[a&&b]$", ["a", "&", "b"], ["c"]),
    ("^[a-c[]]$", ["a]", "[]"], ["a", "-]"]),
    (r"^[\]\\^-]$", ["]", "\\", "^", "-"], ["a"]),
    ("^[~~a-]$", ["~", "a", "-"], ["b"]),
    ("^[^]$", ["\n", "a"], ["", "ab"]),
    ("^a[]?b$", ["ab"], ["a]b"]),
    ("^a{,2}$", ["a{,2}"], ["aa", ""]),
    ("^{}]$", ["{}]"], [""]),
    ("^a{2,3}?b*?$", ["aa", "aaab"], ["a", "aaaa"]),
    (r"^\/\-\@\<\"$", ['/-@<"'], ["/-@"]),
    (r"^\u0041\x42\u{43}\cI\0?$", ["ABC\t"], ["ABC"]),
    (r"^\ud83d\ude00$", ["😀"], ["a"]),
    (r"^(?<year>\d{4})(?:-(?P<m>\d))?$", ["2024", "2024-1"], ["24"]),
    (r"^\p{Lu}\P{L}$", ["É1"], ["é1", "EE"]),
    (r"^[\p{Lu}-]$", ["É", "-"], ["é"]),
    ("^(?:ab)*c??(d{2})+$", ["abcdd", "dddd"], ["ddd", "c"]),
    ("#é ~&", ["x#é ~&"], ["#é"]),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), CASES, ids=[pattern for pattern, _, _ in CASES])
def test_patterns(pattern: str, right: list[str], wrong: list[str]) -> None:
    matcher = matcher_of({"type": "string", "pattern": pattern})
    for text in right:
        assert accepts(matcher, json.dumps(text, ensure_ascii=False)), text
    for text in wrong:
        assert not accepts(matcher, json.dumps(text, ensure_ascii=False)), text


NOT_ECMASCRIPT = [
    "(?i)a",
    "(?i:a)",
    "a(?s).",
    "(?>a)",
    "a++",
    "a{2}{3}",
    "a*?+",
    "a**",
    "*a",
    "(+a)",
    "(?:*)",
    "a|?",
    "^*",
]
NOT_RUST = ["a(?=b)", "(?<!a)b", "[", r"[\]", r"\A", r"\z", r"(a)\1", r"\ud800", r"\u{110000}", r"[\k]", r"\b+"]


@pytest.mark.parametrize("pattern", [*NOT_RUST, *NOT_ECMASCRIPT])
def test_what_rust_cannot_say_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="a regex with"):
        to_rust(pattern)


@pytest.mark.parametrize(
    "pattern", ["[" * 200_000, "(?" * 100_000, "\\u{" * 80_000, "[a" * 100_000 + "]", "a{1" * 80_000]
)
def test_long_patterns_take_no_longer_than_others(pattern: str) -> None:
    """They would take minutes if each place looked at all that follows it."""
    try:
        to_rust(pattern)
    except ValueError as error:
        assert "a regex with" in str(error)
