"""Texts of all kinds for comparisons of tokenizers: the same ones on every machine."""

from __future__ import annotations

import base64
import functools
import random
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<|user|>", "[INST]")
CODE = (
    "def f{n}(x: int) -> str:\n    '''Return x's text.'''\n\treturn f\"{{x!r:>{n}}}\" if x != {n} else None\n",
    '#include <stdio.h>\nint main(void) {{\n\tprintf("%d\\n", 0x{n:x} << 3);\r\n\treturn -{n};\n}}\n',
    "template <typename T> auto f(T&& t) -> decltype(t) {{ return std::forward<T>(t)[{n}]; }} // don't\n",
    'fn main() {{\n    let v: Vec<u8> = (0..{n}).map(|i| i as u8).collect();\n    println!("{{:?}}", &v[..]);\n}}\n',
    'public static void main(String[] args) {{\n    System.out.println("n = " + {n}L);\n}}\n',
    "const f = async (x) => {{ await g`${{x}}`; return x?.y ?? {n}; }};\n\n\n// it's\n",
    "SELECT COUNT(*) FROM t WHERE id >= {n} AND name LIKE 'O''Brien%' -- we'll see\n;",
    '#!/bin/sh\nfor i in $(seq 1 {n}); do echo "$i" >> "${{HOME}}/x.log" 2>&1; done\n',
    "package main\n\nfunc main() {{\n\tch := make(chan int, {n})\n\tgo func() {{ ch <- 1 }}()\n\t_ = <-ch\n}}\n",
    '(defun f (x)\n  (cond ((> x {n}) \'yes)\n        (t "no")))\n',
    "module F where\n\nf :: Int -> [Int]\nf n = [ x * y | x <- [1..n], y <- [x..{n}] ]\n",
    "\\begin{{equation}}\n  \\sum_{{i=1}}^{{{n}}} x_i^2 \\leq \\frac{{1}}{{n}}\n\\end{{equation}}\n",
)
PROSE = (
    "The quick brown fox doesn't jump; it's lazy, they've said. We'll see what she'd do, I'm sure you're right!",
    "IT'S WHAT THEY'VE SAID: WE'LL, I'D, YOU'RE, I'M, DON'T. 'Tis ''quoted'' 'sir' o'clock rock'n'roll",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich – „Straße“ STRASSE ǅ ﬁne",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë au delà des îles, aujourd'hui",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ЁЛКА",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία. ΣΊΣΥΦΟΣ",
    "いろはにほへと ちりぬるを、カタカナも。東京都2026年11月28日！",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。１２３４５",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ١٢٣٤٥٦",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה שָׁלוֹם",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓",
    "Do bạch kim rất quý nên sẽ dùng để lắp vô xương. Tiếng Việt",
    "İstanbul'da pijamalı hasta yağız şoföre çabucak güvendi. ıI iİ",
)
MARKUP = (
    "<!DOCTYPE html>\n<div class=\"a b-{n}\" id='c'>&nbsp;&lt;x&gt; &#x{n:x};<br/>\n</div>\n\n<!-- it's -->",
    "# Title {n}\n\n* one\n  * two\n\n```py\nx = {n}\n```\n| a | b |\n|---|:-:|\n[link](https://ex.org/a?b={n}&c=%20#d)",
    '{{"a": [1, 2.5e-{n}, null], "b\\u00e9": {{"c": "\\n\\t"}}}}',
    "2026-11-28T11:{n:02}:00+00:00 ERROR [main-{n}] user@example.com 192.168.0.{n} /usr/lib/x86_64/../lib.so.{n}",
    "a,b;c\td|e\\f/g~h^i`j@k#l$m%n&o*p(q)r-s_t=u+v[w]x{{y}}z!?<>'\"...---___***===",
)
RANGES = (
    *((0x21, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x556), (0x5D0, 0x5EA), (0x621, 0x64A)),
    *((0x905, 0x939), (0x985, 0x98C), (0xB85, 0xB8A), (0xE01, 0xE30), (0x10A0, 0x10C5), (0x1100, 0x1112)),
    *((0x1200, 0x1246), (0x13A0, 0x13F4), (0x1780, 0x17B3), (0x1E00, 0x1EFF), (0x2010, 0x2027), (0x2070, 0x2071)),
    *((0x20A0, 0x20B5), (0x2150, 0x2188), (0x2190, 0x23CE), (0x2460, 0x24FF), (0x2500, 0x26FF), (0x3041, 0x3096)),
    *((0x30A1, 0x30FA), (0x3105, 0x312C), (0x3400, 0x4DB5), (0x4E00, 0x9FA5), (0xA000, 0xA48C), (0xAC00, 0xD7A3)),
    *((0xFB00, 0xFB06), (0xFF01, 0xFF9D), (0x10300, 0x1031E), (0x10400, 0x1044F), (0x1D400, 0x1D454)),
    *((0x20000, 0x2A6D6), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F)),
)
"""Characters that Unicode had long ago."""
MARKS = ((0x300, 0x34E), (0x64B, 0x652), (0x93E, 0x94D), (0x591, 0x5BD), (0xE34, 0xE3A), (0x20D0, 0x20DC))
DIGITS = (0x30, 0x660, 0x966, 0xE50, 0xFF10, 0x2460, 0x2070, 0x2160, 0xBC, 0x1D7CE)
SPACES = (
    *(" ", "  ", "\t", "\n", "\r", "\r\n", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2009", "\u2028"),
    *("\u2029", "\u202f", "\u3000", "\u200b", "\ufeff", "\x1c", "\x1f"),
)
EMOJI = (
    *("👨‍👩‍👧‍👦", "👩🏽‍💻", "🏳️‍🌈", "🇫🇷🇩🇪", "1️⃣", "❤️", "🤷🏾‍♀️", "☺", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "👍🏿👍", "©️™", "😀😃"),
    *("\u200d", "\ufe0f", "🇫", "🏽"),
)
GLUE = ("", "", " ", "  ", "\n", "\n\n", "\t", " '", "'", ".", ", ", "-", "\r\n", "    ")


@functools.cache
def texts() -> list[str]:
    """2,000 texts, each at most some hundred characters."""
    rng = random.Random(2026)
    kinds = (_code, _prose, _markup, _numbers, _script, _marks, _spaces, _emoji, _controls, _special, _base64)
    kinds += (_contractions, _long, _any)
    found = ["", " ", "\n", "a", "0", "é", "'s", "\0", "\ufffd"]
    while len(found) < 1200:
        found += [kind(rng) for kind in kinds]
    del found[1200:]
    while len(found) < 2000:
        found.append(_join(rng, [_cut(rng, _pick(rng, found[:1200])) for _ in range(2 + _below(rng, 4))]))
    return found


def _below(rng: random.Random, end: int) -> int:
    """A number; unlike randrange, the same in all versions of Python."""
    return int(rng.random() * end)


def _pick(rng: random.Random, choices: Sequence[Any]) -> Any:
    return choices[_below(rng, len(choices))]


def _cut(rng: random.Random, text: str) -> str:
    first = _below(rng, len(text) + 1)
    return text[first : first + 1 + _below(rng, 60)]


def _join(rng: random.Random, parts: Sequence[str]) -> str:
    return "".join(part + _pick(rng, GLUE) for part in parts)


def _several(rng: random.Random, most: int, one: Callable[[], str]) -> list[str]:
    return [one() for _ in range(1 + _below(rng, most))]


def _code(rng: random.Random) -> str:
    text = _pick(rng, CODE).format(n=_below(rng, 10 ** (1 + _below(rng, 5))))
    indent = _pick(rng, ("", "", " ", "    ", "\t", " \t"))
    return "".join(indent + line for line in text.splitlines(keepends=True))


def _prose(rng: random.Random) -> str:
    return _join(rng, _several(rng, 3, lambda: _cut(rng, _pick(rng, PROSE))))


def _markup(rng: random.Random) -> str:
    return _pick(rng, MARKUP).format(n=_below(rng, 60))


def _numbers(rng: random.Random) -> str:
    def number() -> str:
        zero, size = _pick(rng, (0x30, 0x30, 0x30, *DIGITS)), 1 + _below(rng, 24)
        most = 3 if zero == 0xBC else 10
        return "".join(chr(zero + _below(rng, most)) for _ in range(size))

    glue = _pick(rng, ("", " ", ".", ",", "-", ":", "e", "x", " + ", "\n", "%"))
    return _pick(rng, ("", "-", "$", "No. ", "v", " ")) + glue.join(_several(rng, 5, number))


def _letter(rng: random.Random, ranges: Sequence[tuple[int, int]]) -> str:
    first, last = _pick(rng, ranges)
    while unicodedata.category(letter := chr(first + _below(rng, last - first + 1))) == "Cn":
        pass
    return letter


def _script(rng: random.Random) -> str:
    here = [_pick(rng, RANGES) for _ in range(2)]
    words = _several(rng, 6, lambda: "".join(_several(rng, 12, lambda: _letter(rng, here))))
    return _pick(rng, (" ", "", ", ", "\n")).join(words)


def _marks(rng: random.Random) -> str:
    def marked() -> str:
        return _letter(rng, RANGES[:13]) + "".join(_several(rng, 3, lambda: _letter(rng, MARKS)))

    form = _pick(rng, ("NFC", "NFD", ""))
    text = "".join(_several(rng, 20, marked)) + _cut(rng, _pick(rng, PROSE))
    return unicodedata.normalize(form, text) if form else text


def _spaces(rng: random.Random) -> str:
    here = [_pick(rng, SPACES) for _ in range(3)]
    runs = _several(rng, 6, lambda: "".join(_several(rng, 14, lambda: _pick(rng, here))))
    return "".join(run + _pick(rng, ("", "a", "Word", "1", "!", "'s", "é")) for run in runs)


def _emoji(rng: random.Random) -> str:
    return _join(rng, _several(rng, 10, lambda: _pick(rng, EMOJI)))


def _controls(rng: random.Random) -> str:
    return "".join(_several(rng, 20, lambda: chr(_pick(rng, (_below(rng, 32), 0x7F + _below(rng, 34))))))


def _special(rng: random.Random) -> str:
    def either() -> str:
        token = _pick(rng, SPECIAL)
        return _pick(rng, (token, token, token[:-1], f" {token} ", _cut(rng, _pick(rng, PROSE))))

    return _join(rng, _several(rng, 6, either))


def _base64(rng: random.Random) -> str:
    data = bytes(_below(rng, 256) for _ in range(_below(rng, 120)))
    return _pick(rng, (base64.b64encode(data).decode(), data.hex(), data.decode("latin-1"), repr(data)))


def _contractions(rng: random.Random) -> str:
    words = ("it", "IT", "Don", "they", "naïve", "9", "", " ", "'", "\n", "Ünder")
    ends = (
        "'s",
        "'S",
        "'t",
        "'T",
        "'re",
        "'Re",
        "'RE",
        "'ve",
        "'VE",
        "'m",
        "'M",
        "'ll",
        "'LL",
        "'lL",
        "'d",
        "'x",
        "'ſ",
    )
    return _join(rng, _several(rng, 8, lambda: _pick(rng, words) + _pick(rng, ends) + _pick(rng, ("", "", "s", "D"))))


def _long(rng: random.Random) -> str:
    unit = _pick(rng, ("a", "ab", "Ab", "é", "日", "=", "-", "0", " ", "\n", "ha", "THE", "the", "😀", "_x", "\u0301"))
    return _pick(rng, ("", " ", "x")) + unit * (1 + _below(rng, 300 // len(unit)))


def _any(rng: random.Random) -> str:
    return "".join(_several(rng, 60, lambda: _letter(rng, (*RANGES, *MARKS))))
