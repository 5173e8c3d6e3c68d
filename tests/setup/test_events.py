"""Ports of KV events beside that of the HTTP server."""

from __future__ import annotations

import re

import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.setup.resolver import resolve
from tests.setup.small import HOST, make_model, make_resolved


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kv_events": "tcp://*:5557", "port": 5557},
            r"^--kv-events is tcp://\*:5557, where --port listens too; give another$",
        ),
        ({"kv_events": "tcp://127.0.0.1:5557", "port": 5557}, "^--kv-events is"),
        ({"kv_events": "tcp://localhost:5557", "port": 5557}, "^--kv-events is"),
        ({"kv_events": "tcp://10.0.0.1:5557", "host": "0.0.0.0", "port": 5557}, "^--kv-events is"),
        ({"kv_events": "tcp://[::1]:5557", "host": "::1", "port": 5557}, "^--kv-events is"),
        ({"kv_events": "tcp://*:7999"}, r"^--kv-events-replay is tcp://\*:8000, where --port listens too"),
    ],
)
def test_a_port_that_is_taken_twice_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_resolved(**given)


@pytest.mark.parametrize("replay", ["tcp://127.0.0.1:5557", "tcp://*:5557"])
def test_events_and_replay_at_one_port_are_refused_without_a_server_too(replay: str) -> None:
    message = f"^--kv-events-replay is {re.escape(replay)}, where --kv-events listens too"
    with pytest.raises(ConfigError, match=message):
        make_resolved(kv_events="tcp://*:5557", kv_events_replay=replay)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kv_events": "tcp://*:5557"},
        {"kv_events": "tcp://10.0.0.1:8000"},
        {"kv_events": "tcp://*:0", "port": 0},
        {"kv_events": "tcp://*:*"},
        {"kv_events": "ipc:///run/kv:8000"},
    ],
)
def test_ports_of_their_own(given: dict[str, object]) -> None:
    make_resolved(**given)


def test_without_a_server_only_its_port_is_free() -> None:
    options = Options(kv_events="tcp://*:8000", host="0.0.0.0")
    assert resolve(options, make_model(), HOST, serves=False).warnings == ()
    taken = Options(kv_events="tcp://*:8000", kv_events_replay="tcp://127.0.0.1:8000")
    with pytest.raises(ConfigError, match=r"^--kv-events-replay is tcp://127\.0\.0\.1:8000, where --kv-events listens"):
        resolve(taken, make_model(), HOST, serves=False)
