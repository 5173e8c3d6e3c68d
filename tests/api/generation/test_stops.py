"""Stop strings in any pieces equal a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.generation.choice import StopPatterns, StopStrings


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Whole-string search: the match that ends first, the longest of those."""
    found = [
        (at + len(stop), -len(stop), stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)
    ]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(chunks=st.lists(st.text("abc\n", max_size=5), max_size=20), stops=STOPS)
def test_stop_strings_in_any_pieces_equal_a_search_of_the_whole(chunks: list[str], stops: list[str]) -> None:
    matcher, whole = StopStrings(StopPatterns(stops)), "".join(chunks)
    out = ""
    for i, chunk in enumerate(chunks):
        out += matcher.push(chunk)
        so_far = "".join(chunks[: i + 1])
        if matcher.matched is None:
            held = so_far[len(out) :]
            assert out + held == so_far
            assert held == "" or any(stop.startswith(held) for stop in stops)
    out += matcher.flush()
    assert (out, matcher.matched) == search(whole, stops)


def test_text_after_a_stop_string_is_dropped() -> None:
    matcher = StopStrings(StopPatterns(["STOP"]))
    assert [matcher.push(piece) for piece in ("aS", "TO", "Pb", "c")] == ["a", "", "", ""]
    assert matcher.flush() == ""
