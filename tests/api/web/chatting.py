"""What somebody does in the playground."""

from __future__ import annotations

import json
from pathlib import Path

from tests.api.web.browser import Page

PICTURES = Path(__file__).parents[3] / "docs" / "images"
FIELD = "document.querySelector('#composer textarea')"
ANSWERS = "[...document.querySelectorAll('.assistant[aria-busy=false]')]"
LAST = "document.querySelector('.message:last-child')"


def ask(page: Page, text: str) -> str:
    """Type a message and send it with Enter; return the answer once it is complete."""
    page.click(FIELD)
    page.type(text)
    page.press("Enter", 13, "\r")
    return answered(page, text)


def answered(page: Page, question: str) -> str:
    """Wait until the last message answers `question`, the last one of the user; return it."""
    asked = "[...document.querySelectorAll('.user .prose')].at(-1)?.textContent"
    page.wait(f"{asked} === {json.dumps(question)} && {LAST}.matches('.assistant[aria-busy=false]:has(.foot button)')")
    return answer(page)


def answer(page: Page) -> str:
    """The text of the last message."""
    found: str = page.run(f"({LAST}.querySelector('.prose')?.textContent ?? '')")
    return found


def fill(page: Page, code: str, text: str) -> None:
    """Replace the text of the field that an expression finds."""
    page.wait(code)
    page.run(f"{code}.scrollIntoView(), {code}.focus(), {code}.select()")
    page.type(text)


def unfold(page: Page, title: str) -> None:
    """Open a section of the settings."""
    page.click(f"[...document.querySelectorAll('#settings summary')].find(s => s.textContent === {json.dumps(title)})")


def setting(label: str) -> str:
    """An expression that finds the field of a setting."""
    return (
        "[...document.querySelectorAll('#settings :is(input, select, textarea)')]"
        f".find(e => [...e.labels].some(l => l.textContent.startsWith({json.dumps(label)})))"
    )


def picture(page: Page, name: str) -> None:
    """Write a picture for the documents where it is missing."""
    path = PICTURES / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        page.prefer("light")
        page.screenshot(path)
    assert path.stat().st_size < 100_000
