"""The dashboard in a real browser, while a real server works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

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
def working(bundled: Server) -> Iterator[Server]:
    """The server with a host tier, drafts and six clients."""
    done = threading.Event()

    def keep_asking(client: int) -> None:
        with bundled.http as http:
            for i in range(100_000):
                if done.is_set():
                    return
                question = QUESTIONS * (1 + (client + i) % 4) + f"And {client} + {i % 7}?"
                body = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "ignore_eos": True}
                assert http.post("/v1/chat/completions", json=body).status_code == 200
                done.wait(0.6)  # or the browser has to wait for the processor

    clients = [threading.Thread(target=keep_asking, args=(client,)) for client in range(CLIENTS)]
    for thread in clients:
        thread.start()
    yield bundled
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
    page.wait("document.querySelector('.chart, .plot .line').getAttribute('d').split('L').length > 6")
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
    page.before_scripts(
        "const read = Response.prototype.json; Response.prototype.json = async function () {"
        " const found = await read.call(this); const at = found.samples?.at_s;"
        " if (at) found.samples.at_s = at.map((_, i) => 60 * (found.seen.samples - at.length + i));"
        " return found; };"
    )  # a sample a minute, however seldom a server under load takes them
    page.go(working.url + "/dashboard")
    points = (
        "document.querySelectorAll('figure')[1]?.querySelector('.line').getAttribute('d')?.split(/[ML]/).length - 1"
    )
    choose(page, "600")
    page.wait(f"{points} > 5 && {points} < 13")
    page.click(page.button("Pause"))
    page.wait("document.querySelector('#pause').ariaPressed === 'true'")
    choose(page, "120")
    page.wait(f"{points} <= 3")


def choose(page: Page, seconds: str) -> None:
    """Show this much time."""
    page.run(
        f"(() => {{ const span = document.querySelector('#span'); span.value = '{seconds}';"
        " span.dispatchEvent(new Event('change')); })()"
    )


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
    while working.metric("pypto:engine_steps_total") < steps + 300:
        page.pause()
    assert len(page.requests) <= asked + 1
    page.click(page.button("Resume"))
    page.until(lambda: len(page.requests) > asked + 2)


def test_a_key_is_asked_for_once(start: Callable[..., RunningServer], open_page: OpenPage) -> None:
    page = open_page(start(api_keys=("sesame",)).url + "/dashboard")
    page.wait("document.querySelector('dialog[open]')")
    page.press("Escape", 27)
    page.wait("document.querySelector('#state').textContent.startsWith('No answer: The server wants an API key')")
    asked = len(page.requests)
    page.until(lambda: len(page.requests) > asked + 1)
    assert page.run("document.querySelector('dialog')") is None
    page.click(page.button("API key"))
    page.wait("document.querySelector('#key-field')")
    page.type("sesame")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('#state').textContent === 'ready'")
    page.complaints = [each for each in page.complaints if "401" not in each]


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


LIVES = """
    const answer = (life, now_s, seen, at_s, total) => ({
        life, now_s,
        samples: {at_s, total, respawns: at_s.map(at => at > 3000 ? 1 : 0), seen: at_s.map(() => [1, 0, 0])},
        finished: [{id: life}], interval_s: 1, max_samples: 6, max_finished: 3, seen: {samples: seen, finished: 1}});
"""


def test_history_of_the_page(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    found = page.run(
        f"""import('/web/history.js').then(({{History, quantile, quotients}}) => {{
            {LIVES}
            const history = new History();
            history.take(answer('a', 11, 2, [10, 11], [100, 150]), 1011);
            history.take(answer('a', 14, 4, [12, 14], [150, 250]), 1014.5);
            return {{times: history.times, rates: history.rate('total', 1), grown: history.growth('total', 5),
                    ranks: history.quantile('seen', [2, 4], 0.5, 10), none: quantile([0, 0, 0], [2, 4], 0.5),
                    high: quantile([0, 1, 1], [2, 4], 0.99), middle: quantile([0, 4, 0], [2, 4], 0.25),
                    shares: quotients([1, 1, null], [2, 0, null]), finished: history.finished.length}};
        }})"""
    )
    assert found == {
        "times": [1010, 1011, 1012, 1014], "rates": [None, 50, 0, 50], "grown": [None, 50, 50, 150],
        "ranks": [None, 1, 1, 1], "none": None, "high": 4, "middle": 2.5, "shares": [0.5, None, None], "finished": 2,
    }  # fmt: skip


def test_samples_of_two_lives_and_around_a_gap_are_not_joined(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    found = page.run(
        f"""import('/web/history.js').then(({{History}}) => {{
            {LIVES}
            const history = new History();
            const shown = () => ({{times: history.times, starts: history.starts, restarts: history.restarts,
                                  rates: history.rate('total', 5), finished: history.finished.map(({{id}}) => id)}});
            history.take(answer('a', 12, 3, [10, 11, 12], [0, 10, 20]), 1012);
            history.take(answer('a', 41, 5, [40, 41], [500, 510]), 1041);
            const gap = shown();
            history.take(answer('b', 3001, 2, [3000, 3001], [30, 40]), 1043);
            const restart = shown();
            history.take(answer('c', 10, 3, [8, 9, 10], [1, 2, 3]), 1043.5);
            return {{gap, restart, overlap: shown()}};
        }})"""
    )
    assert found["gap"] == {
        "times": [1010, 1011, 1012, 1040, 1041], "starts": [True, False, False, True, False], "restarts": [],
        "rates": [None, 10, 10, None, 10], "finished": ["a", "a"],
    }  # fmt: skip
    assert found["restart"] == {
        "times": [1011, 1012, 1040, 1041, 1042, 1043], "starts": [True, False, True, False, True, False],
        "restarts": [{"time": 1042, "what": "server"}, {"time": 1043, "what": "worker"}],
        "rates": [None, 10, None, 10, None, 10], "finished": ["b"],
    }  # fmt: skip
    assert found["overlap"]["times"] == [1012, 1040, 1041, 1041.5, 1042.5, 1043.5]
    assert found["overlap"]["starts"] == [True, True, False, True, False, False]


def test_charts_leave_gaps_and_name_times(working: Server, open_page: OpenPage) -> None:
    page = open_page(working.url + "/dashboard")
    page.send("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    found = page.run(
        """import('/web/chart.js').then(({Chart}) => {
            const times = [0, 1, 2, 3, 40, 41, 42, 50, 60].map((time) => 1790000000 + time);
            const starts = times.map((_, i) => i === 0 || i === 4);
            const history = {times, starts, restarts: [{time: times[4], what: 'server'}]};
            const rows = [[1, 1, null, 1, 1, 1, 1, null, 1], [0, 2, null, 1, 0, 0, 0, null, 2]];
            let last = null;
            const paths = [false, true].map((stacked) => {
                const chart = new Chart('Some', ['a', 'b'], {format: String, stacked});
                document.body.append(chart.element);
                last = chart.element;
                chart.show(history, rows, 120);
                return [...chart.element.querySelectorAll('.line, .layer')].map((each) => each.getAttribute('d'));
            });
            const [gap, restart] = ['.gap', '.restart'].map((name) => last.querySelector(name).getAttribute('d'));
            const ticks = [...last.querySelectorAll('.tick')].map((tick) => tick.textContent);
            const plot = last.querySelector('svg');
            plot.focus();
            const keys = ['Home', 'ArrowRight', 'End', 'ArrowLeft', 'ArrowLeft', 'ArrowLeft', 'ArrowLeft'];
            const read = keys.map((key) => {
                plot.dispatchEvent(new KeyboardEvent('keydown', {key}));
                return last.querySelector('.when').textContent;
            });
            return {paths, gap, restart, ticks, read};
        })"""
    )
    lines, layers = found["paths"]
    assert lines[0] == "M0.0 0.0L10.0 0.0M30.0 0.0h0M400.0 0.0L410.0 0.0L420.0 0.0M600.0 0.0h0".replace(" 0.0", " 65.0")
    assert layers[1].count("M") == layers[1].count("Z") == 4 and layers[1].startswith("M0.0 104.0L10.0 52.0L10.0 104.0")
    assert (found["gap"], found["restart"]) == ("M30.0 0H400.0V130H30.0Z", "M400.0 0V130")
    assert found["ticks"] == ["19:43:40", "19:44:00"]
    assert found["read"][:3] == ["19:43:20, 60 s ago", "19:43:21, 59 s ago", "19:44:20, 0 s ago"]
    assert found["read"][-1] == "19:44:00, 20 s ago, server restarted"


def test_a_new_worker_and_a_new_server_are_other_lives(
    open_page: OpenPage, is_accessible: Callable[[Page], None]
) -> None:
    line = "document.querySelectorAll('figure')[1]?.querySelector('.line').getAttribute('d')"
    marks = "document.querySelector('.restart').getAttribute('d')"
    with Server("--max-model-len", "256") as server:
        page = open_page(server.url + "/dashboard", 390, 800)
        choose(page, "600")
        lives = "document.querySelector('[aria-label=Workers] td:nth-child(4)')?.textContent"
        page.wait(f"{lives} === '1' && {line}.includes('L')")
        assert page.run(marks) == ""
        server.worker().kill()
        page.wait(f"{lives} === '2' && document.querySelector('#state').textContent === 'ready'")
        page.wait(f"{marks}.split('M').length === 2")
        port = urlsplit(server.url).port
    page.wait("document.querySelector('#state').textContent.startsWith('No answer')")
    assert port is not None
    with Server("--max-model-len", "256", port=port):
        page.wait(f"{marks}.split('M').length === 3")
        page.click(page.button("Pause"))
        page.wait("document.querySelector('#pause').ariaPressed === 'true'")
        assert page.run("document.querySelectorAll('#charts figure').length") == 8
        drawn, start = page.run(f"[{line}, {marks}.split('M').at(-1).split(' ')[0]]")
        assert f"M{start} " in drawn and not drawn.startswith(f"M{start} ")  # not joined to what was before
        assert page.run("document.documentElement.scrollWidth") == 390
        assert page.run("document.querySelector('#span').checkVisibility()")
        is_accessible(page)
    page.complaints = [each for each in page.complaints if "CONNECTION" not in each]
