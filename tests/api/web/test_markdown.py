"""Outputs of models in the page: what they look like, and that none becomes markup, code or a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.api.running import RunningServer
from tests.api.web.browser import Browser, Page
from tests.api.web.chatting import ask
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
)
"""What must not happen: `hacked` is set, an element comes into being, or something is fetched."""

FORMS = {
    "plain": "<p>plain</p>",
    "**bold** and *slanted* and ~~gone~~": "<p><strong>bold</strong> and <em>slanted</em> and <s>gone</s></p>",
    "snake_case_name and 2*3*4": "<p>snake_case_name and 2*3*4</p>",
    "`a ** b` and ``x`y``": "<p><code>a ** b</code> and <code>x`y</code></p>",
    r"\*not slanted\*": "<p>*not slanted*</p>",
    "# One\n## Two": "<h3>One</h3><h4>Two</h4>",
    "a\n\nb": "<p>a</p><p>b</p>",
    "---": "<hr>",
    "> said\n> more": "<blockquote><p>said\nmore</p></blockquote>",
    "- one\n- two": "<ul><li>one</li><li>two</li></ul>",
    "3. three\n4. four": '<ol start="3"><li>three</li><li>four</li></ol>',
    "- one\n  - inner\n- two": "<ul><li>one<ul><li>inner</li></ul></li><li>two</li></ul>",
    "2 < 3 & 4 > 1": "<p>2 &lt; 3 &amp; 4 &gt; 1</p>",
    "**open": "<p>**open</p>",
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
    assert '<pre tabindex="0"><code>x = 1\n\ny = [2]</code></pre>' in shown(page, "```python\nx = 1\n\ny = [2]\n```")
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


@pytest.mark.parametrize(
    "piece", ["**a", "*a ", "[", "`", "> ", "- ", "  - ", "|a", "~~", "_a", "![](", "\\", "https://a"]
)
def test_nothing_takes_long(page: Page, piece: str) -> None:
    milliseconds = page.run(
        "import('/web/markdown.js').then(({showMarkdown}) => { const host = document.createElement('div');"
        f" const start = performance.now(); showMarkdown(host, {json.dumps(piece)}.repeat(4000));"
        " return performance.now() - start; })"
    )
    assert milliseconds < 3000


@pytest.mark.parametrize(
    "text",
    [
        "# " + " " * 10_000 + "x",
        "# a" + " #" * 5_000 + "x",
        "```" + " " * 10_000 + "`",
        "- -" + " " * 10_000 + "x",
        "a|b\n-" + " " * 10_000 + "x",
        "- [x]" + " " * 10_000 + "\u2028",
        "- a" + "\n" * 10_000 + "x",
        "[](" + " " * 10_000 + "x",
        "[a](b" + " " * 10_000 + "x",
    ],
)
def test_shapes_that_make_expressions_slow_take_linear_time(page: Page, text: str) -> None:
    assert took_ms(page, text) < 500


def test_no_character_takes_long_when_there_are_10_000(page: Page) -> None:
    slow = {code: ms for code in range(1, 128) if (ms := took_ms(page, chr(code) * 10_000)) > 2000}
    assert slow == {}


def took_ms(page: Page, text: str) -> float:
    found: float = page.run(
        "import('/web/markdown.js').then(({showMarkdown}) => { const host = document.createElement('div');"
        f" const start = performance.now(); showMarkdown(host, {json.dumps(text)});"
        " return performance.now() - start; })"
    )
    return found


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
