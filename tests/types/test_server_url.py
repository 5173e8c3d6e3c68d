"""Addresses of servers: their parts, the `/v1` that clients of the API give or leave out, and what is refused."""

from __future__ import annotations

import pytest

from pypto_serving.types.server_url import ServerUrl, parse_server_url
from tests.addresses import HOSTILE


@pytest.mark.parametrize(
    ("text", "parts", "netloc"),
    [
        ("http://127.0.0.1:8000", (False, "127.0.0.1", 8000, ""), "127.0.0.1:8000"),
        ("https://api.example/", (True, "api.example", 443, ""), "api.example"),
        ("HTTP://[::1]:81/base/v1/", (False, "::1", 81, "/base/v1"), "[::1]:81"),
        ("http://bücher.example", (False, "bücher.example", 80, ""), "bücher.example"),
    ],
)
def test_parts(text: str, parts: tuple[object, ...], netloc: str) -> None:
    url = parse_server_url(text)
    assert (tuple(url), url.netloc) == (parts, netloc)


@pytest.mark.parametrize(
    ("path", "asked", "target"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/v1", "/v1/models", "/v1/models"),
        ("/base/v1", "/v1/models", "/base/v1/models"),
        ("/base", "/v1/models", "/base/v1/models"),
        ("/v1", "/completions", "/v1/completions"),
        ("/v1", "/v2/x", "/v1/v2/x"),
    ],
)
def test_v1_is_not_doubled(path: str, asked: str, target: str) -> None:
    assert ServerUrl(False, "h", 80, path).target(asked) == target


@pytest.mark.parametrize("text", HOSTILE)
def test_an_address_that_no_request_can_be_sent_to(text: str) -> None:
    with pytest.raises(ValueError):
        parse_server_url(text)
