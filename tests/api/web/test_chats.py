"""The list of conversations, settings that are wrong, answers that go on or end early: in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script
from tests.api.web.browser import Page
from tests.api.web.chatting import FIELD, LAST, ask, fill, setting, unfold
from tests.api.web.conftest import OpenPage

pytestmark = pytest.mark.e2e

LONG = "Pneumonoultramicroscopicsilicovolcanoconiosis and " * 6
STATUS = "document.getElementById('status').textContent"


def begin(page: Page, text: str) -> None:
    """Send a message, and wait until its answer has begun."""
    page.click(FIELD)
    page.type(text)
    page.press("Enter", 13, "\r")
    page.wait(
        f"{LAST}.matches('.assistant[aria-busy=true]') && {LAST}.querySelector('.prose')?.textContent === 'hello'"
    )


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.soak)])
def test_long_titles_stay_within_the_list(
    says: Callable[..., RunningServer], open_page: OpenPage, is_accessible: Callable[[Page], None], width: int
) -> None:
    page = open_page(says("hello").url + "/", width, 800)
    page.wait("document.querySelector('#settings option')")
    ask(page, LONG.strip())
    if width == 390:
        page.click(page.button("Conversations"))
    inside = page.run(
        "(() => { const panel = document.querySelector('#chats').getBoundingClientRect();"
        " return [...document.querySelectorAll('.list :is(.title, time, button)')].map(e => {"
        " const box = e.getBoundingClientRect();"
        " return box.left >= panel.left && box.right <= panel.right && box.width > 20;"
        " }); })()"
    )
    assert len(inside) == 5 and all(inside)
    is_accessible(page)


def test_conversations_are_renamed_found_deleted_and_brought_back(
    says: Callable[..., RunningServer], open_page: OpenPage
) -> None:
    page = open_page(says("hello").url + "/")
    ask(page, "About apples")
    page.click(page.button("New chat"))
    ask(page, "About pears")
    page.click(page.button("Rename About pears"))
    page.run("document.activeElement.select()")
    page.type("Fruit")
    page.press("Enter", 13, "\r")
    titles = "[...document.querySelectorAll('.list .title')].map(e => e.textContent)"
    assert page.run(titles) == ["Fruit", "About apples"]
    assert page.run("document.activeElement.ariaLabel") == "Rename Fruit"
    fill(page, "document.querySelector('#chats input')", "pears")
    assert page.run(titles) == ["Fruit"]
    page.click(page.button("Delete Fruit"))
    assert page.run(titles) == []
    page.wait("document.activeElement.textContent === 'Undo'")
    page.press("Enter", 13, "\r")
    page.wait(f"{titles}.length === 1")
    assert page.run("document.querySelector('.user .prose').textContent") == "About pears"


def test_conversations_are_exported_and_imported(page_of_hello: Page) -> None:
    page = page_of_hello
    ask(page, "Keep this")
    counts = page.run(
        "Promise.all([import('/web/transfer.js'), import('/web/store.js')]).then(([transfer, store]) => {"
        " const read = transfer.readChats(transfer.writeChats(store.allChats())); read.forEach(store.saveChat);"
        " const told = text => { try { return transfer.readChats(text).length }"
        " catch (error) { return error.message } };"
        " return [read.length, store.listChats().map(chat => chat.title), told('x'), told('{}'), told('[]'),"
        '  told(\'{"chats": [{"nodes": {"a": {"role": "user", "content": "x", "parent": "a"}}}]}\'),'
        '  told(\'[{"role": "user", "content": "hi"}]\')]; })'
    )
    damaged = "a conversation in it is damaged"
    nothing = "it holds no conversations"
    assert counts == [1, ["Keep this"] * 2, "it is not JSON", nothing, "it holds no messages", damaged, 1]


@pytest.fixture
def page_of_hello(says: Callable[..., RunningServer], open_page: OpenPage) -> Page:
    return open_page(says("hello").url + "/")


def test_a_file_goes_along_as_text(
    says: Callable[..., RunningServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    page = open_page(says("hello").url + "/")
    page.run(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['line one'], 'notes.txt'));"
        " data.items.add(new File([new Uint8Array([0, 255])], 'image.png'));"
        " document.querySelector('.box').dispatchEvent(new DragEvent('drop', {dataTransfer: data})); })()"
    )
    page.wait("document.querySelector('.chip') && document.querySelector('.toast')")
    assert "image.png is not attached: it is not text" in page.run("document.querySelector('.toast').textContent")
    ask(page, "Read it")
    assert page.run("document.querySelector('.user .file .title').textContent") == "notes.txt"
    page.click(page.button("Export"))
    page.wait("document.querySelector('dialog pre')")
    assert "notes.txt:\\n```\\nline one\\n```" in page.run("document.querySelector('dialog pre').textContent")


@pytest.mark.parametrize(
    ("section", "label", "name", "value", "words"),
    [
        ("Sampling", "Temperature", "temperature", "9", "Must be from 0 to 2"),
        ("Sampling", "Max tokens", "max_tokens", "1.5", "Must be a whole number"),
        ("Sampling", "Seed", "seed", "x", "Must be a number"),
        ("More", "Further fields", "more", "[1]", "Must be an object"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(
    page_of_hello: Page, section: str, label: str, name: str, value: str, words: str
) -> None:
    page = page_of_hello
    unfold(page, section)
    fill(page, setting(label), value)
    assert words in page.run(f"document.querySelector('#setting-{name}-wrong').textContent")
    page.click(FIELD)
    page.type("Hello")
    page.press("Enter", 13, "\r")
    page.wait(f"document.activeElement.id === 'setting-{name}'")
    assert page.run(f"[{FIELD}.value, document.querySelectorAll('.message').length]") == ["Hello", 0]


def test_an_answer_goes_on_behind_another_conversation(
    start: Callable[..., RunningServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    server = start()
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    page = open_page(server.url + "/")
    begin(page, "First")
    page.click(page.button("New chat"))
    page.wait("document.querySelector('.welcome')")
    assert page.run("document.querySelector('.sign.busy').textContent") == "answering"
    assert not server.engine.aborted
    server.call(lambda: [each.finish() for each in server.engine.submissions])
    page.wait("document.querySelector('.sign:not(.busy)')?.textContent === 'new answer'")
    page.click("document.querySelector('.pick')")
    page.wait(f"{LAST}.matches('.assistant[aria-busy=false]')")
    assert page.run("document.querySelector('.sign')") is None


def test_a_stopped_answer_keeps_its_counts(
    start: Callable[..., RunningServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    server = start()
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    page = open_page(server.url + "/")
    begin(page, "First")
    page.press("Escape", 27)
    page.wait(f"{LAST}.querySelector('.stats')?.textContent.includes('stopped')")
    stats = page.run(f"{LAST}.querySelector('.stats').textContent")
    assert f"{len(tokenizer.encode('hello'))} tokens" in stats and "prompt tokens" in stats


def test_choices_stay_apart(start: Callable[..., RunningServer], open_page: OpenPage, tokenizer: Tokenizer) -> None:
    server = start()
    server.engine.script = lambda request: Script(tokenizer.encode("hello world hello world"), "stop")
    page = open_page(server.url + "/")
    unfold(page, "More")
    fill(page, setting("Further fields"), '{"n": 2}')
    assert ask(page, "Twice") == "hello world hello world"
    page.click(page.button("Later version"))
    page.wait(f"{LAST}.querySelector('[aria-label=\"Version 2 of 2\"]')")
    assert page.run(f"{LAST}.querySelector('.prose').textContent") == "hello world hello world"


def test_a_server_that_is_gone_is_said_in_words(start: Callable[..., RunningServer], open_page: OpenPage) -> None:
    server = start()
    page = open_page(server.url + "/")
    page.wait("document.querySelector('#settings option')")
    server.stop()
    page.click(FIELD)
    page.type("Hello")
    page.press("Enter", 13, "\r")
    page.wait(f"{LAST}.querySelector('.error')")
    assert "The server cannot be reached" in page.run(f"{LAST}.querySelector('.error').textContent")
    page.complaints = [each for each in page.complaints if "ERR_CONNECTION" not in each]


def test_exports_with_fields_of_others_run(page_of_hello: Page, tmp_path: Path) -> None:
    page = page_of_hello
    unfold(page, "More")
    fill(page, setting("Further fields"), '{"ignore_eos": false, "min_tokens": 1, "n": 2, "stream": true}')
    fill(page, setting("System prompt"), 'It\'s `a` $test \\ "so"')
    ask(page, "Hello")
    page.click(page.button("Export"))
    page.wait("document.querySelectorAll('dialog pre').length === 2")
    curl, python = (page.run(f"document.querySelectorAll('dialog pre')[{i}].textContent") for i in (0, 1))
    shown = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout
    assert [each["message"]["content"] for each in json.loads(shown)["choices"]] == ["hello", "hello"]
    (tmp_path / "exported.py").write_text(python)
    printed = subprocess.run([sys.executable, tmp_path / "exported.py"], capture_output=True, text=True)
    assert (printed.stderr, printed.stdout) == ("", "hello\nhello\n")


def test_targets_are_large_enough_for_fingers(says: Callable[..., RunningServer], open_page: OpenPage) -> None:
    page = open_page(says("hello").url + "/", 390, 800)
    page.wait("document.querySelector('#settings option')")
    ask(page, "Hello")
    page.click(page.button("Conversations"))
    small = (
        "[...document.querySelectorAll('button, .tabs a')].filter(b => b.checkVisibility())"
        ".map(b => [b.ariaLabel ?? b.textContent, b.getBoundingClientRect()])"
        ".filter(([, r]) => r.height < 40 || r.width < 40).map(([name]) => name)"
    )
    assert page.run(small) == []
    assert page.run("document.documentElement.scrollWidth") == 390
