"""Outputs of models in the page: what they look like, and that none becomes markup, code or a request."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator

import pytest

from tests.api.running import RunningServer
from tests.api.web.browser import Browser, Page
from tests.api.web.chatting import ask, picture
from tests.api.web.conftest import OpenPage, opened

pytestmark = pytest.mark.e2e

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'><style>*{display:none}</style></svg>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "[click](javascript:window.hacked=1)",
    "[click](JaVaScRiPt&colon;window.hacked=1)",
    "[click](\x01javascript:window.hacked=1)",
    "[click](data:text/html,<script>window.hacked=1</script>)",
    "[click](vbscript:window.hacked=1)",
    "[click](//example.com/x)",
    '[a" onmouseover="window.hacked=1](https://example.com/"onmouseover="window.hacked=1)',
    "![picture](https://example.com/steal?secret)",
    "![picture](/health)",
    "<https://example.com/<script>>",
    "`<img src=x onerror=window.hacked=1>`",
    "```html\n<script>window.hacked = 1</script>\n```",
    '```"><script>window.hacked = 1</script>\nx\n```',
    "| <b onclick=window.hacked=1>a</b> |\n|---|\n| <script>window.hacked=1</script> |",
    "# <base href=https://example.com>",
    "<form action=https://example.com><button>Send</button></form>",
    "<meta http-equiv=refresh content='0;url=https://example.com'>",
    "- [x] <input autofocus onfocus=window.hacked=1>",
    r"$\href{javascript:window.hacked=1}{x}$ and $\text{<img src=x onerror=window.hacked=1>}$",
    "```html\n<a href='javascript:window.hacked=1' onclick='window.hacked=1'>\n```",
)
"""What must not happen: `hacked` is set, an element comes into being, or something is fetched."""

FORMS = {
    "plain": "<p>plain</p>",
    "**bold** and *slanted* and ~~gone~~": "<p><strong>bold</strong> and <em>slanted</em> and <s>gone</s></p>",
    "snake_case_name and 2*3*4": "<p>snake_case_name and 2*3*4</p>",
    "`a ** b` and ``x`y``": "<p><code>a ** b</code> and <code>x`y</code></p>",
    r"\*not slanted\*": "<p>*not slanted*</p>",
    "# One\n## Two": "<h2>One</h2><h3>Two</h3>",
    "a\n\nb": "<p>a</p><p>b</p>",
    "---": "<hr>",
    "> said\n> more": "<blockquote><p>said\nmore</p></blockquote>",
    "- one\n- two": "<ul><li><p>one</p></li><li><p>two</p></li></ul>",
    "3. three\n4. four": '<ol start="3"><li><p>three</p></li><li><p>four</p></li></ol>',
    "- one\n  - inner\n- two": "<ul><li><p>one</p><ul><li><p>inner</p></li></ul></li><li><p>two</p></li></ul>",
    "2 < 3 & 4 > 1": "<p>2 &lt; 3 &amp; 4 &gt; 1</p>",
    "**open": "<p>**open</p>",
    "***both*** **a *b* c** *a **b** c*": (
        "<p><strong><em>both</em></strong> <strong>a <em>b</em> c</strong> <em>a <strong>b</strong> c</em></p>"
    ),
    "**重点**是 ~x~ ****": "<p><strong>重点</strong>是 ~x~ ****</p>",
    "1. a\n\n2. b\n\n   c": "<ol><li><p>a</p></li><li><p>b</p><p>c</p></li></ol>",
    "one<br>two": "<p>one<br>two</p>",
    "from $5 to $6, $7-$8 and $HOME:$PATH": "<p>from $5 to $6, $7-$8 and $HOME:$PATH</p>",
    "$x_1$": "<p><math><msub><mi>x</mi><mn>1</mn></msub></math></p>",
    r"\(\frac{a}{2}\)": "<p><math><mfrac><mi>a</mi><mn>2</mn></mfrac></math></p>",
    r"$\mathbb{R} \le \alpha$": (
        '<p><math><mrow><mi mathvariant="normal">ℝ</mi><mo>≤</mo><mi>α</mi></mrow></math></p>'
    ),
    r"$\unknown{x}$ and $a_$": r'<p><code class="tex">\unknown{x}</code> and <code class="tex">a_</code></p>',
    r"$\constructor$": r'<p><code class="tex">\constructor</code></p>',
}


@pytest.fixture(scope="module")
def page(chat_server: RunningServer, browser: Browser) -> Iterator[Page]:
    with opened(browser) as open_page:
        yield open_page(chat_server.url + "/")


def shown(page: Page, text: str) -> str:
    """The markup that `text` becomes."""
    found: str = page.run(
        "import('/web/markdown.js').then(module => { const host = document.createElement('div');"
        f" module.showMarkdown(host, {json.dumps(text)}); return host.innerHTML; }})"
    )
    return found


def test_no_output_becomes_more_than_text(says: Callable[..., RunningServer], open_page: OpenPage) -> None:
    page = open_page(says("\n\nbefore\n\n".join(("", *ATTACKS, "after"))).url + "/")
    before = page.run("document.querySelectorAll('script, img, iframe, style, base, meta, form, object').length")
    found = ask(page, "hello")
    assert found.count("before") == len(ATTACKS) + 1 and "after" in found
    assert (
        page.run("document.querySelectorAll('script, img, iframe, style, base, meta, form, object').length") == before
    )
    for link in page.run("[...document.querySelectorAll('.prose a')].map(a => a.href)"):
        assert link.startswith("https://example.com/")
    page.run("document.querySelectorAll('.prose *').forEach(e => e.dispatchEvent(new Event('mouseover')))")
    attributes = "[...document.querySelectorAll('.prose *')].flatMap(e => e.getAttributeNames())"
    assert page.run(f"{attributes}.filter(name => name.startsWith('on') || name === 'style' || name === 'src')") == []
    assert page.run("window.hacked") is None


@pytest.mark.parametrize("text", FORMS)
def test_forms(page: Page, text: str) -> None:
    assert shown(page, text) == FORMS[text]


def test_code_tables_tasks_and_links(page: Page) -> None:
    assert '<pre tabindex="0"><code>x\n\ny = z</code></pre>' in shown(page, "```python\nx\n\ny = z\n```")
    assert "<code>still coming</code>" in shown(page, "```\nstill coming")
    table = shown(page, "| a | b |\n|:--|--:|\n| 1 | **2** |")
    assert '<th class="start" scope="col">a</th>' in table and '<td class="end"><strong>2</strong></td>' in table
    assert 'type="checkbox" disabled="" checked=""' in shown(page, "- [x] done")
    link = shown(page, "see [here](https://example.com/a_(b)) or https://example.com/c.")
    assert link.count('rel="noopener noreferrer nofollow"') == 2 and 'href="https://example.com/a_(b)"' in link
    assert link.endswith("</a>.</p>")


def test_whatever_comes_next_is_as_if_all_had_come_at_once(page: Page) -> None:
    text = "# Title\n\n- a\n  - `b`\n\n```js\nlet x;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    text += "> *q* [l](https://e.com)\n1. x"
    same = page.run(
        "import('/web/markdown.js').then(({showMarkdown}) => { const text = " + json.dumps(text) + ";"
        " const host = document.createElement('div'); const wrong = [];"
        " for (let i = 0; i <= text.length; i++) { showMarkdown(host, text.slice(0, i));"
        "  const fresh = document.createElement('div'); showMarkdown(fresh, text.slice(0, i));"
        "  if (host.innerHTML !== fresh.innerHTML) wrong.push(i); } return wrong; })"
    )
    assert same == []


PIECES = (
    "# T\n", "- a", "\n", "\n\n", "  - b `c`\n", "```js\nlet x; // c\n", "```\n", "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "> q\n", "> - z\n", "1. x\n", "10) y\n", "$$\nx^2\n- b\n$$\n", "$a_b$", "**b", "**", "*", "_", "`", "\\[ x \\]",
    "[l](https://e.com)", "\n---\n", "text with words ", "- [x] t\n", "- [ ", "    code\n", "w " * 900, "<!-- a\n",
    "\\begin{cases}a&b\\\\c&d\\end{cases}\n", "```python\n\'\'\'a\nb\'\'\'\n", "```html\n<a href=\'\nx\'>\n",
    "$$", "\\(", "\r\n", "~~x~~",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_any_text_that_grows_is_shown_as_if_it_had_come_at_once(page: Page, seed: int) -> None:
    chance = random.Random(seed)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(3, 30))) for _ in range(8)]
    wrong = page.run(
        "import('/web/markdown.js').then(({showMarkdown}) => { const wrong = [];"
        f" for (const text of {json.dumps(texts)}) {{ const host = document.createElement('div');"
        " for (let i = 0; i <= text.length; i += text.length > 1500 ? 11 : 1) { showMarkdown(host, text.slice(0, i));"
        "  const fresh = document.createElement('div'); showMarkdown(fresh, text.slice(0, i));"
        "  if (host.innerHTML !== fresh.innerHTML) { wrong.push(text.slice(0, i)); break; } } } return wrong; })"
    )
    assert wrong == []


LONG = {
    "prose": ("", "A sentence of **some** length with `code` and $x^2$ in it. And another one.\n\n"),
    "code": ("```python\n", "def double(x):  # twice\n    return x + 'a' * 12\n\n"),
    "a line": ("```python\n", "x = 1; "),
    "list": ("", "- an item with *some* words\n"),
    "items within an item": ("- a\n", "  - an item with *some* words\n"),
    "table": ("| a | b | c |\n|---|---|---|\n", "| a | **b** | 12 |\n"),
    "paragraph": ("", "words and more words **bold** "),
    "quote": ("", "> words and more\n> - an item\n"),
}
TOKENS = 8192


@pytest.mark.parametrize("kind", LONG)
def test_an_answer_that_comes_takes_work_in_proportion_to_its_length(counting: Page, kind: str) -> None:
    begin, part = LONG[kind]
    text = begin + part * (4 * TOKENS // len(part))
    half, whole = (streamed(counting, text[: len(text) // parts], 16) for parts in (2, 1))
    assert whole < 2.3 * half


def streamed(page: Page, text: str, step: int) -> int:
    """The work for a text that comes bit by bit."""
    return page.work(
        "import('/web/markdown.js').then(({showMarkdown}) => { const host = document.createElement('div');"
        f" const text = {json.dumps(text)}; const step = {step};"
        " for (let i = 0; i < text.length + step; i += step) showMarkdown(host, text.slice(0, i)); })"
    )


@pytest.fixture(scope="module")
def counting(chat_server: RunningServer, browser: Browser) -> Iterator[Page]:
    """A page whose work is counted."""
    with opened(browser) as open_page:
        page = open_page(chat_server.url + "/")
        page.count_work()
        page.go(chat_server.url + "/")
        page.run(
            "import('/web/markdown.js').then(({showMarkdown}) => showMarkdown(document.createElement('div'), 'a'))"
        )
        yield page


PARTS = ("**a", "*a ", "***a *", "[", "![](", "`", "`a``", "> ", "- ", "  - ", "|a", "~~", "_a", "\\", "<", "https://a")


@pytest.mark.parametrize("piece", [*PARTS, "$a", "$$ ", "\\("])
def test_nothing_takes_long(counting: Page, piece: str) -> None:
    assert growth(counting, piece * 2000, piece * 4000) < 2.3


@pytest.mark.parametrize("before", ["", "- ", "# ", "```\n", "a|b\n-|-\n", "[](", "[a](b", "$", "$$", "- [x]", "> - "])
def test_shapes_that_go_on_take_linear_time(counting: Page, before: str) -> None:
    for piece in (" ", "#", "\n", "x", "x ", "a|", "\\"):
        assert growth(counting, before + piece * 3000 + "x", before + piece * 6000 + "x") < 2.3, piece


def growth(page: Page, half: str, whole: str) -> float:
    """How much more work the longer text is; what little there is at all is left out."""
    least = 5000
    return (least + streamed(page, whole, len(whole))) / (least + streamed(page, half, len(half)))


@pytest.mark.parametrize("part", [r"\sqrt", r"\left(", r"\begin{matrix}", r"\frac", "{", "x^", "x_"])
def test_formulas_that_nest_too_deeply_stay_text(page: Page, part: str) -> None:
    assert shown(page, f"$${part * 300}$$").startswith('<div class="display"><code class="tex">')


CODE = {
    ("python", "x = 'a'  # b"): "x = <string>'a'</string>  <comment># b</comment>",
    (
        "python",
        '"""a\nb""" + f(1)',
    ): '<string>"""a</string>\n<string>b"""</string> + <call>f</call>(<number>1</number>)',
    ("js", "/* a\nb */ let c"): "<comment>/* a</comment>\n<comment>b */</comment> <keyword>let</keyword> c",
    ("json", '{"a": [1, true]}'): '{<meta>"a"</meta>: [<number>1</number>, <keyword>true</keyword>]}',
    ("rust", "fn f<'a>(x: &'a T) {}"): "<keyword>fn</keyword> f&lt;<meta>'a</meta>&gt;(x: &amp;<meta>'a</meta> T) {}",
    ("sh", 'echo "$A" $B # c'): '<keyword>echo</keyword> <string>"$A"</string> <meta>$B</meta> <comment># c</comment>',
    ("yaml", "a: it's no # b"): "<meta>a</meta>: it's <keyword>no</keyword> <comment># b</comment>",
    ("html", '<a href="x">y</a>'): (
        '<keyword>&lt;a</keyword> <meta>href</meta>=<string>"x"</string><keyword>&gt;</keyword>'
        "y<keyword>&lt;/a&gt;</keyword>"
    ),
    ("sql", "SELECT 'a' -- b"): "<keyword>SELECT</keyword> <string>'a'</string> <comment>-- b</comment>",
    ("diff", "+a\n-b\n c"): "<added>+a</added>\n<removed>-b</removed>\n c",
    ("nothing", "let <x> = 1"): "let &lt;x&gt; = 1",
}


@pytest.mark.parametrize(("language", "text"), CODE)
def test_code_has_colours(page: Page, language: str, text: str) -> None:
    markup = shown(page, f"```{language}\n{text}\n```").partition("<code>")[2].partition("</code>")[0]
    named = re.sub(r'<span class="hl-(\w+)">([^<]*)</span>', r"<\1>\2</\1>", markup)
    assert named == CODE[language, text]


def test_cells_of_a_table_break_between_words_only(page: Page) -> None:
    page.resize(390, 800)
    widths = page.run(
        "import('/web/markdown.js').then(({showMarkdown}) => { const host = document.createElement('div');"
        " host.className = 'prose'; document.querySelector('#thread').append(host);"
        " const row = (cell) => '|' + `${cell}|`.repeat(6) + '\\n';"
        " showMarkdown(host, row('Characteristics') + row('-') + row('Internationalization'));"
        " const cell = host.querySelector('td'); const scrolled = host.querySelector('.scrolled');"
        " return [cell.getClientRects().length, cell.offsetHeight, scrolled.scrollWidth > scrolled.clientWidth,"
        " document.documentElement.scrollWidth]; })"
    )
    assert (widths[0], widths[1] < 60, widths[2], widths[3]) == (1, True, True, 390)


ANSWER = r"""# Gradient descent

It finds a **minimum** of a function by walking *downhill*. With a learning rate $\eta$, each step is

$$\theta_{t+1} = \theta_t - \eta \nabla_\theta \frac{1}{n} \sum_{i=1}^{n} \mathcal{L}\left(f_\theta(x_i), y_i\right)$$

```python
def descend(gradient, x, rate=0.1, steps=100):
    for _ in range(steps):  # or until it moves no more
        x -= rate * gradient(x)
    return x
```

| Method | Memory | Converges | Usual rate |
|:--|--:|:-:|--:|
| SGD | $n$ | slowly | `0.1` |
| Momentum | $2n$ | faster | `0.01` |
| Adam | $3n$ | **fastest at first** | `0.001` |
"""


@pytest.mark.parametrize("width", [390, 1440])
def test_an_answer_of_all_kinds_fits_and_is_accessible(
    says: Callable[..., RunningServer], open_page: OpenPage, is_accessible: Callable[[Page], None], width: int
) -> None:
    page = open_page(says(ANSWER).url + "/", width, 844)
    ask(page, "How does gradient descent work?")
    assert page.run("document.querySelectorAll('.prose :is(math, table, pre, h2)').length") == 8
    assert page.run("document.documentElement.scrollWidth") == width
    too_wide = (
        "[...document.querySelector('.assistant .prose').children].filter(e => e.scrollWidth > e.clientWidth + 1)"
    )
    assert page.run(f"{too_wide}.filter(e => !e.matches('.code-block')).map(e => e.outerHTML)") == []
    assert "local" in page.run("getComputedStyle(document.querySelector('.prose pre')).backgroundAttachment")
    is_accessible(page)
    if width == 1440:
        page.resize(1280, 860)
        page.run("document.activeElement.blur(), document.querySelector('#thread').scrollTo(0, 0)")
        page.run("document.querySelector('.stats').remove()")  # figures of no model
        picture(page, "playground.webp")
