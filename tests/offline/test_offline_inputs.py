"""What programs give to the offline API is read like the body of a request."""

from __future__ import annotations

import pytest

from pypto_serving.errors import RequestError
from pypto_serving.offline.inputs import read_conversation


def test_text_parts_are_joined_as_over_http() -> None:
    parts = ({"type": "text", "text": "hel"}, {"type": "text", "text": "lo"})
    given = [{"role": "user", "content": parts, "name": "me"}, {"role": "assistant", "content": None}]
    assert read_conversation(given) == [
        {"role": "user", "content": "hel\nlo", "name": "me"},
        {"role": "assistant", "content": ""},
    ]


def test_a_part_that_is_no_text_is_refused_as_over_http() -> None:
    with pytest.raises(RequestError, match="a part of type 'image_url'") as caught:
        read_conversation([{"role": "user", "content": [{"type": "image_url"}]}])
    assert (caught.value.param, caught.value.code) == ("messages[0].content[0]", "unsupported_content")
