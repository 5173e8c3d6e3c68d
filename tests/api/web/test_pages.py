"""What the server says with the pages, and what is in them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from pypto_serving.api.web.pages import FOLDER, POLICY, files
from tests.api.running import COMPLETIONS, RunningServer
from tests.api.web.expressions import Matcher, TooManyStepsError, expressions, hostile, parsed

MAX_BYTES = 150_000
MAX_LINES = 350
MAX_GROWTH = 2.6
"""How much more a matcher may do for a text twice as long: 4 would be quadratic."""
PAGES = ("/", "/dashboard")


@pytest.mark.parametrize("path", [*PAGES, "/web/playground.js", "/web/base.css", "/web/mark.svg"])
def test_everything_forbids_what_is_not_its_own(server: RunningServer, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY
    assert "default-src 'none'" in POLICY and "require-trusted-types-for 'script'" in POLICY


def test_all_together_are_small() -> None:
    assert 0 < sum(len(file.compressed) for file in files().values()) < MAX_BYTES


def test_files_are_short_and_all_are_used(server: RunningServer) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert texts.keys() == files().keys()
    assert [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES] == []
    everything = "\n".join(texts.values())
    assert [name for name in texts if not name.endswith(".html") and name not in everything] == []


def test_nothing_is_fetched_from_elsewhere_and_no_text_becomes_markup() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1998/Math/MathML",
        }
        assert addresses == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert path.suffix != ".html" or not re.search(r"<script>|<style|\son\w+=|style=", text), path


SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
EXPRESSIONS = sorted({found for text in SCRIPTS.values() for found in expressions(text)})


@pytest.mark.parametrize(("pattern", "flags"), EXPRESSIONS)
def test_no_expression_takes_more_than_linear_time(pattern: str, flags: str) -> None:
    assert growth(pattern, flags) < MAX_GROWTH


@pytest.mark.parametrize("pattern", [r"^(a+)+$", r"\s+$", r"(a|a)*b", r"^.*-.*-.*x", r"a*a*b", "<.*>.*</.*>"])
def test_expressions_that_do_are_found(pattern: str) -> None:
    assert growth(pattern, "") > MAX_GROWTH


def growth(pattern: str, flags: str) -> float:
    """How the steps grow where a hostile text is twice as long, for the worst of them."""
    tree = parsed(pattern, flags)
    matcher = Matcher(tree, "y" in flags)
    try:
        counts = [[matcher.count(text) for text in hostile(tree, many)] for many in (32, 64)]
    except TooManyStepsError:
        return inf
    return max(longer / shorter for shorter, longer in zip(*counts, strict=True))


def test_every_expression_is_a_literal_that_is_found() -> None:
    source = "a = b / c / d; x(/[/]\\/`/gi, `a${y / 2 / /z+/.test(`${q}/no/`)}/no/`, '/no/'); // /no/\nreturn /r/"
    assert list(expressions(source)) == [("[/]\\/`", "gi"), ("z+", ""), ("r", "")]
    assert len(EXPRESSIONS) > 20
    for name, text in SCRIPTS.items():
        assert not re.search(r"\bRegExp\b|\.(match|matchAll|search)\([\"'`]", text), name


def test_a_browser_gets_what_it_has_not(server: RunningServer) -> None:
    packed = server.http.get("/web/playground.js", headers={"accept-encoding": "gzip"})
    plain = server.http.get("/web/playground.js", headers={"accept-encoding": "identity"})
    assert (packed.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
    assert packed.content == plain.content == (FOLDER / "playground.js").read_bytes()
    assert gzip.decompress(files()["playground.js"].compressed) == plain.content
    tag = plain.headers["etag"]
    again = server.http.get("/web/playground.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    head = server.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e/pages.py", "playground.js/x"])
def test_there_are_no_other_files(server: RunningServer, name: str) -> None:
    assert server.http.get(f"/web/{name}").status_code == 404


def test_pages_need_no_key_and_figures_do(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("sesame",))
    assert [server.http.get(path).status_code for path in (*PAGES, "/web/dom.js")] == [200, 200, 200]
    assert server.http.get("/dashboard/stats").status_code == 401
    assert server.http.get("/dashboard/stats", headers={"authorization": "Bearer sesame"}).status_code == 200


def test_figures_are_as_described(server: RunningServer) -> None:
    first = looked(server)
    seen, life = first["seen"], first["life"]
    server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 5})
    found = looked(server, f"?life={life}&samples={seen['samples']}&finished={seen['finished']}")
    (request,) = found["finished"]
    assert (request["reason"], request["output_tokens"], request["prompt_tokens"] > 0) == ("length", 5, True)
    assert len(found["samples"]["at_s"]) == found["seen"]["samples"] - seen["samples"]
    assert {len(column) for column in found["samples"].values()} == {len(found["samples"]["at_s"])}
    assert found["life"] == life and all(at_s <= found["now_s"] for at_s in found["samples"]["at_s"])
    query = f"&samples={found['seen']['samples']}&finished={found['seen']['finished']}"
    assert looked(server, f"?life={life}{query}")["finished"] == []
    assert looked(server, f"?life=another{query}")["finished"] == looked(server)["finished"]
    assert {type(value) for value in found["replicas"][0].values()} == {str, int, float, list}
    assert all(type(group["block_bytes"]) is int for group in found["groups"])


@pytest.mark.parametrize(
    "query", ["", "?samples=1", "?life=LIFE&samples=x", "?life=LIFE&samples=-1", "?life=LIFE&samples=" + "9" * 50]
)
def test_a_reader_that_has_seen_something_else_gets_all(server: RunningServer, query: str) -> None:
    query = query.replace("LIFE", looked(server)["life"])
    assert len(looked(server, query)["samples"]["at_s"]) == looked(server)["seen"]["samples"]


def looked(server: RunningServer, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = server.http.get(f"/dashboard/stats{query}").json()
    return found
