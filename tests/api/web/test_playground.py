"""The playground in a real browser, before the bundled model."""

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
from tests.api.web.chatting import FIELD, LAST, answer, answered, ask, fill, setting, unfold
from tests.api.web.conftest import OpenPage
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def page(bundled: Server, open_page: OpenPage) -> Page:
    page = open_page(bundled.url + "/")
    page.wait("document.querySelector('#settings option')")
    return page


def test_a_chat_is_answered_edited_and_regenerated(bundled: Server, page: Page) -> None:
    assert ask(page, "What is 37 + 45?") == "37 + 45 = 82"
    stats = page.run(f"{LAST}.querySelector('.stats').textContent")
    assert "tokens" in stats and "tok/s" in stats and "TTFT" in stats
    page.click(page.button("Edit", "document.querySelector('.user')"))
    page.run("document.activeElement.select()")
    page.type("What is 12 + 30?")
    page.click(page.button("Save and send"))
    assert answered(page, "What is 12 + 30?") == "12 + 30 = 42"
    page.click(page.button("Regenerate"))
    page.wait(f"{LAST}.querySelector('[aria-label=\"Version 2 of 2\"]')")
    assert answered(page, "What is 12 + 30?") == "12 + 30 = 42"
    page.click(page.button("Earlier version", "document.querySelector('.user')"))
    assert answered(page, "What is 37 + 45?") == "37 + 45 = 82"
    page.go(bundled.url + "/")
    page.wait("document.querySelector('.assistant')")
    assert answer(page) == "37 + 45 = 82"


def test_a_message_is_deleted_and_a_conversation_too(page: Page) -> None:
    ask(page, "What is 1 + 1?")
    ask(page, "What is 2 + 2?")
    page.click(page.button("Delete", "[...document.querySelectorAll('.user')].at(-1)"))
    page.wait("document.querySelectorAll('.message').length === 2")
    page.click(page.button("New chat"))
    page.wait("document.querySelector('.welcome')")
    ask(page, "What is 3 + 3?")
    assert page.run("document.querySelectorAll('.pick').length") == 2
    page.click("document.querySelector('.pick:not([aria-current])')")
    assert answered(page, "What is 1 + 1?") == "1 + 1 = 2"
    page.run("document.querySelector('[aria-label=\"Delete What is 1 + 1?\"]').click()")
    page.wait("document.querySelectorAll('.pick').length === 1 && document.querySelector('.welcome')")
    assert page.run("Object.keys(localStorage).filter(key => key.startsWith('pypto.chat.')).length") == 1


def test_a_conversation_that_is_deleted_while_its_answer_comes_stays_away(
    start: Callable[..., RunningServer], open_page: OpenPage, tokenizer: Tokenizer
) -> None:
    server = start()
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    page = open_page(server.url + "/")
    page.click(FIELD)
    page.type("Hello")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('.assistant[aria-busy=true] .prose')?.textContent === 'hello'")
    page.click("document.querySelector('[aria-label=\"Delete Hello\"]')")
    page.wait("document.querySelector('.welcome')")
    server.wait_for(lambda: bool(server.engine.aborted))
    assert page.run("document.querySelectorAll('.pick').length") == 0
    assert page.run("Object.keys(localStorage).filter(key => key.startsWith('pypto.chat.')).length") == 0


def test_an_answer_is_stopped(bundled: Server, page: Page) -> None:
    unfold(page, "More")
    fill(page, setting("Further fields"), '{"ignore_eos": true, "max_tokens": 2000}')
    page.click(FIELD)
    page.type("Hello")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('.assistant[aria-busy=true] .prose')?.textContent.length > 10")
    page.press("Escape", 27)
    answered(page, "Hello")
    assert "stopped" in page.run(f"{LAST}.querySelector('.stats').textContent")
    page.wait("fetch('dashboard/stats').then(r => r.json()).then(s => s.finished.some(f => f.reason === 'abort'))")


def test_a_function_is_called_and_its_result_used(page: Page, is_accessible: Callable[[Page], None]) -> None:
    unfold(page, "Tools")
    page.click(page.button("Insert an example"))
    ask(page, "What is 123 * 456?")
    call = json.loads(page.run(f"{LAST}.querySelector('.call pre').textContent"))
    assert page.run(f"{LAST}.querySelector('.call strong').textContent") == "calculate"
    assert call == {"expression": "123 * 456"}
    is_accessible(page)
    fill(page, f"{LAST}.querySelector('.results textarea')", "56088")
    page.click(page.button("Send result"))
    page.wait("document.querySelectorAll('.assistant').length === 2")
    assert "56088" in answered(page, "What is 123 * 456?")


def test_an_answer_has_the_form_of_a_schema(page: Page) -> None:
    unfold(page, "Format")
    page.run(f"{setting('Answers are')}.value = 'json_schema'")
    page.run(f"{setting('Answers are')}.dispatchEvent(new Event('change'))")
    page.click(page.button("Insert an example"))
    assert set(json.loads(ask(page, "What is 5 + 6?"))) == {"answer"}


def test_probabilities_of_tokens_are_read_with_the_keyboard(page: Page, is_accessible: Callable[[Page], None]) -> None:
    unfold(page, "More")
    page.click(setting("Probabilities"))
    ask(page, "What is 5 + 6?")
    page.click(page.button("Probabilities of tokens"))
    page.wait("document.querySelectorAll('.token').length > 5")
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight", 39)
    assert page.run("[...document.querySelectorAll('.token')].findIndex(t => t.matches('.selected'))") == 3
    chosen = page.run("document.querySelector('.alternative.chosen').textContent")
    assert chosen.startswith(page.run("document.querySelector('.selected').textContent.trim()")) and "%" in chosen
    is_accessible(page)


def test_a_request_is_exported_and_runs(page: Page, tmp_path: Path) -> None:
    fill(page, setting("System prompt"), 'It\'s a "test"')
    unfold(page, "Sampling")
    fill(page, setting("Top k"), "5")
    fill(page, setting("Max tokens"), "30")
    ask(page, "What is 8 + 9?")
    page.click(page.button("Export"))
    page.wait("document.querySelectorAll('dialog pre').length === 2")
    curl, python = (page.run(f"document.querySelectorAll('dialog pre')[{i}].textContent") for i in (0, 1))
    answers = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout
    assert json.loads(answers)["choices"][0]["message"]["content"] == answer(page)
    (tmp_path / "exported.py").write_text(python)
    printed = subprocess.run([sys.executable, tmp_path / "exported.py"], capture_output=True, text=True)
    assert printed.stderr == ""
    assert printed.stdout.strip() == answer(page)


def test_a_setting_that_is_wrong_says_so(page: Page) -> None:
    unfold(page, "Tools")
    fill(page, setting("Tools"), "[{]")
    page.wait("document.querySelector('#setting-tools-wrong').textContent")
    page.click(FIELD)
    page.type("Hello")
    page.press("Enter", 13, "\r")
    page.wait("document.activeElement.id === 'setting-tools'")
    assert "Not sent" in page.run("document.querySelector('.toast').textContent")
    assert page.run("[document.querySelector('.message'), document.querySelector('#composer textarea').value]") == [
        None,
        "Hello",
    ]


def test_a_key_is_asked_for(start: Callable[..., RunningServer], open_page: OpenPage) -> None:
    server = start(api_keys=("sesame",))
    page = open_page(server.url + "/")
    for key in ("wrong", "sesame"):
        page.wait(
            "document.querySelector('#key-field')?.value === ''"
            if key == "wrong"
            else "document.querySelector('#key-field')?.value === 'wrong'"
        )
        fill(page, "document.querySelector('#key-field')", key)
        page.press("Enter", 13, "\r")
    page.wait("document.querySelector('#settings option')?.value === 'tiny'")
    assert ask(page, "Hello") != ""
    assert page.run("JSON.stringify(localStorage).includes('sesame')") is False
    refused = [each for each in page.complaints if "401" in each]
    assert len(refused) == 2
    page.complaints = [each for each in page.complaints if each not in refused]


def test_reasoning_is_folded(
    start: Callable[..., RunningServer],
    open_page: OpenPage,
    tokenizer: Tokenizer,
    is_accessible: Callable[[Page], None],
) -> None:
    server = start(reasoning_parser="qwen3")
    server.engine.script = lambda request: Script(tokenizer.encode("<think>so it **is**</think>It is."), "stop")
    page = open_page(server.url + "/")
    assert ask(page, "Is it?").strip() == "so it is"
    assert page.run(f"{LAST}.querySelector('.body > .prose').textContent").strip() == "It is."
    assert page.run(f"{LAST}.querySelector('details.reasoning').open") is False
    is_accessible(page)
    page.click(f"{LAST}.querySelector('.reasoning summary')")
    page.wait(f"{LAST}.querySelector('.reasoning .prose').checkVisibility()")


def test_a_browser_without_room_goes_on(bundled: Server, page: Page) -> None:
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    assert ask(page, "What is 4 + 5?") == "4 + 5 = 9"
    assert ask(page, "What is 4 + 6?") == "4 + 6 = 10"


def test_the_oldest_conversations_leave(page: Page) -> None:
    kept = page.run(
        """import('/web/store.js').then(({saveChat, listChats}) => {
            const chat = (i, text) => ({id: `c${i}`, title: `${i}`, updated: i, nodes: {text, tokens: text}});
            for (let i = 0; i < 105; i++) saveChat(chat(i, 'x'));
            const many = listChats().map(chat => chat.title);
            for (let i = 200; i < 205; i++) saveChat(chat(i, 'x'.repeat(1_000_000)));
            return [many.length, many[0], many.at(-1), listChats().map(chat => chat.title)];
        })"""
    )
    assert kept == [100, "104", "5", ["204", "203"]]


def test_it_fits_a_phone(bundled: Server, open_page: OpenPage, is_accessible: Callable[[Page], None]) -> None:
    page = open_page(bundled.url + "/", 390, 780)
    ask(page, "What is 20 + 22?")
    assert page.run("document.documentElement.scrollWidth") == 390
    page.click(page.button("Settings"))
    page.wait("document.querySelector('#settings').checkVisibility()")
    is_accessible(page)
