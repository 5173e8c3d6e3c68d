"""The dashboard in a real browser, while a real server works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.running import RunningServer
from tests.api.web.browser import Page
from tests.api.web.conftest import OpenPage
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "dashboard.webp"
CLIENTS = 6
QUESTIONS = "What is 12 + 30? Spell the word planet. Which day comes after Monday? "


@pytest.fixture(scope="module")
def working() -> Iterator[Server]:
    """A server with a host tier, drafts and six clients."""
    options = ("--max-model-len", "1024", "--kv-memory", "4M", "--kv-host-memory", "16M", "--spec-method", "ngram")
    with Server(*options) as server:
        done = threading.Event()

        def keep_asking(client: int) -> None:
            with server.http as http:
                for i in range(100_000):
                    if done.is_set():
                        return
                    question = QUESTIONS * (1 + (client + i) % 4) + f"And {client} + {i % 7}?"
                    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 150, "ignore_eos": True}
                    assert http.post("/v1/chat/completions", json=body).status_code == 200

        clients = [threading.Thread(target=keep_asking, args=(client,)) for client in range(CLIENTS)]
        for thread in clients:
            thread.start()
        try:
            yield server
        finally:
            done.set()
            for thread in clients:
                thread.join()


def figure(page: Page, name: str) -> str:
    """What a tile shows."""
    tile = f"[...document.querySelectorAll('.tile')].find(t => t.firstChild.textContent === '{name}')"
    found: str = page.run(f"{tile}.children[1].textContent")
    return found


def test_it_moves_under_load(working: Server, open_page: OpenPage, is_accessible: Callable[[Page], None]) -> None:
    page = open_page(working.url + "/dashboard", 1440, 1240)
    page.wait("document.querySelector('#state').textContent === 'ready'")
    page.wait("document.querySelectorAll('#panels tbody .track').length >= 10")
    page.wait("document.querySelector('.chart, .plot .line').getAttribute('d').split('L').length > 12")
    assert float(figure(page, "Output").rstrip("/sk")) > 0 and figure(page, "First token").endswith("s")
    lines = page.run("[...document.querySelectorAll('.plot path')].map(p => p.getAttribute('d'))")
    drawn = [line for line in lines if "L" in line]
    assert len(drawn) >= 12
    shown = page.run("document.querySelector('.plot .line').getAttribute('d')")
    page.wait(f"document.querySelector('.plot .line').getAttribute('d') !== '{shown}'")
    tiers = "[...document.querySelectorAll('figure')].find(f => f.textContent.includes('from the cache'))"
    assert page.run(f"[...{tiers}.querySelectorAll('li')].map(li => li.childNodes[1].data)") == ["device", "host"]
    headings = page.run("[...document.querySelectorAll('#panels h2')].map(h => h.textContent)")
    assert headings == ["Recent requests", "Workers", "Memory plan", "Drafts", "Tiers"]
    assert page.run("[...document.querySelectorAll('#panels .piece.decode')].length") > 5
    page.click(page.button("Pause"))
    page.wait("document.querySelector('#pause').ariaPressed === 'true'")
    is_accessible(page)
    page.prefer("dark")
    if not PICTURE.exists():
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(PICTURE)
    assert PICTURE.stat().st_size < 100_000


def test_it_asks_once_at_a_time(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.wait("document.querySelector('#state').textContent === 'ready'")
    page.run(
        "window.now = window.most = window.all = 0; const ask = fetch; window.fetch = (...what) => {"
        " window.all += 1; window.most = Math.max(most, ++now); return ask(...what).finally(() => now--); }; 0"
    )
    for _ in range(3):
        page.run("for (let i = 0; i < 5; i++) document.dispatchEvent(new Event('visibilitychange'))")
        asked = page.run("all")
        page.wait(f"all > {asked}")
    assert page.run("most") == 1


def test_another_time_is_shown_while_it_is_paused(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.run(
        "const read = Response.prototype.json; Response.prototype.json = async function () {"
        " const found = await read.call(this); found.samples.at_s = found.samples.at_s?.map(s => 60 * s);"
        " return found; }; 0"
    )
    points = "document.querySelector('.plot .line')?.getAttribute('d')?.split('L').length"
    page.run(
        "const span = document.querySelector('#span'); span.value = '600'; span.dispatchEvent(new Event('change'))"
    )
    page.wait(f"{points} > 5 && {points} < 13")
    page.click(page.button("Pause"))
    page.wait("document.querySelector('#pause').ariaPressed === 'true'")
    page.run("document.querySelector('#span').value = '120'")
    page.run("document.querySelector('#span').dispatchEvent(new Event('change'))")
    page.wait(f"{points} <= 3")


def test_values_are_read_with_pointer_and_keyboard(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.wait("document.querySelector('.plot .line')?.getAttribute('d').split('L').length > 5")
    page.click(page.button("Pause"))
    page.run("document.querySelector('.plot svg').focus()")
    page.press("ArrowLeft", 37)
    page.press("ArrowLeft", 37)
    page.wait("document.querySelector('.when').textContent.endsWith('s ago')")
    assert "output" in page.run("document.querySelector('#status').textContent")
    assert page.run("document.querySelector('.plot svg').ariaLabel").startswith("Tokens per second: output ")


def test_nothing_is_asked_while_it_is_paused(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.wait("document.querySelectorAll('.tile').length")
    page.click(page.button("Pause"))
    page.wait("document.querySelector('#pause').ariaPressed === 'true'")
    asked = len(page.requests)
    steps = working.metric("pypto:engine_steps_total")
    while working.metric("pypto:engine_steps_total") < steps + 1000:
        page.run("1")
    assert len(page.requests) <= asked + 1
    page.click(page.button("Resume"))
    page.until(lambda: len(page.requests) > asked + 2)


def test_a_key_is_asked_for_once(start: Callable[..., RunningServer], open_page: OpenPage) -> None:
    page = open_page(start(api_keys=("sesame",)).url + "/dashboard")
    page.wait("document.querySelector('dialog[open]')")
    page.press("Escape", 27)
    page.wait("document.querySelector('#state').textContent.startsWith('No answer: the API key')")
    asked = len(page.requests)
    page.until(lambda: len(page.requests) > asked + 1)
    assert page.run("document.querySelector('dialog')") is None
    page.click(page.button("API key"))
    page.wait("document.querySelector('#key-field')")
    page.type("sesame")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('#state').textContent === 'ready'")
    page.complaints = [each for each in page.complaints if "401" not in each]


def test_a_new_worker_is_another_life(open_page: OpenPage) -> None:
    with Server("--max-model-len", "256") as server:
        page = open_page(server.url + "/dashboard")
        lives = "document.querySelector('[aria-label=Workers] td:nth-child(4)')?.textContent"
        page.wait(f"{lives} === '1'")
        server.worker().kill()
        page.wait(f"{lives} === '2' && document.querySelector('#state').textContent === 'ready'")


def test_it_says_that_the_server_is_gone(open_page: OpenPage) -> None:
    with Server("--max-model-len", "256") as server:
        page = open_page(server.url + "/dashboard")
        page.wait("document.querySelector('#state').textContent === 'ready'")
    page.wait("document.querySelector('#state').textContent.startsWith('No answer')")
    page.complaints = [each for each in page.complaints if "CONNECTION" not in each]


def test_requests_far_apart_are_drawn_side_by_side(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.wait("document.querySelector('#state').textContent === 'ready'")
    asked = [
        [1000, 1000.5, 1001, 1002],
        [1001, 1001, 1001.5, 1003],
        [5000, 5000, 5000.5, 5001],
        [9000, 9000, 9000, 9000],
    ]
    drawn = page.run(
        f"""import('/web/panels.js').then(({{requests, withoutIdle}}) => {{
            const asked = {asked};
            const counts = {{prompt_tokens: 1, output_tokens: 1, cached_tokens: 0}};
            const finished = asked.map((timeline, i) => ({{id: `${{i}}`, reason: 'stop', ...counts, timeline}}));
            document.body.replaceChildren(requests(finished));
            const tracks = [...document.querySelectorAll('.track')].reverse();
            return {{moved: withoutIdle(asked), note: document.querySelector('.muted').textContent,
                     starts: tracks.map(t => t.firstChild?.style.insetInlineStart ?? null)}};
        }})"""
    )
    assert drawn["moved"] == [[0, 0.5, 1, 2], [1, 1, 1.5, 3], [3, 3, 3.5, 4], [4, 4, 4, 4]]
    assert drawn["starts"] == ["min(0%, 100% - 2px)", "min(25%, 100% - 2px)", "min(75%, 100% - 2px)", None]
    assert drawn["note"].endswith(" with requests")


def test_history_of_the_page(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    found = page.run(
        """import('/web/history.js').then(({History, quantile, quotients}) => {
            const history = new History();
            const answer = (seen, at_s, total) => ({
                samples: {at_s, total, seen: at_s.map(() => [1, 0, 0])}, finished: [], max_samples: 3, max_finished: 3,
                seen: {samples: seen, finished: 0}});
            history.take(answer(2, [10, 11], [100, 150]));
            history.take(answer(4, [12, 14], [150, 250]));
            const rates = history.rate('total', 1);
            const ranks = history.quantile('seen', [2, 4], 0.5, 10);
            history.take(answer(2, [20, 21], [0, 7]));
            return {rates, ranks, fresh: history.growth('total', 5), none: quantile([0, 0, 0], [2, 4], 0.5),
                    high: quantile([0, 1, 1], [2, 4], 0.99), middle: quantile([0, 4, 0], [2, 4], 0.25),
                    shares: quotients([1, 1], [2, 0])};
        })"""
    )
    assert found == {
        "rates": [0, 50], "ranks": [1, 1], "fresh": [7], "none": None, "high": 4, "middle": 2.5, "shares": [0.5, None]
    }  # fmt: skip
