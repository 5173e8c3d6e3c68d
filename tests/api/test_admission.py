"""Requests beyond the rows are refused, and n counts as n requests."""

from __future__ import annotations

from collections.abc import Callable

from tests.api.running import RunningServer

PATH = "/v1/completions"


def test_choices_for_which_rows_are_free_need_no_queue(start: Callable[..., RunningServer]) -> None:
    server = start(config={"max_num_seqs": 4, "max_queued_requests": 1})
    assert server.post(PATH, {"prompt": "hello", "n": 5}).status_code == 200
    response = server.post(PATH, {"prompt": "hello", "n": 6})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert "6 sequences, but this server runs 4 at once and queues 1" in response.json()["error"]["message"]
