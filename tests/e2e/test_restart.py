"""A restart under load: the first requests after it hit the disk tier at the rate before it, with the same tokens."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from pypto_serving.kernels.abi import runnable
from tests.e2e.restart_clients import Answer, Clients, Shape, end, next_round, one_round
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

SHAPE = Shape(prefixes=20, prefix=256, own=20, output=4, clients=6, vocabulary=range(32, 127))
"""A prompt and its answer end within the block behind the prefix, so what can be found is the prefix."""

DEVICE_TOKENS = 2560


def settled(answers: Sequence[Answer]) -> bool:
    """Whether each prefix was loaded from disk, so that it is there for certain, and the last round hit all of them."""
    stored = {SHAPE.chosen(answer.number) for answer in answers if answer.cached["disk"] == SHAPE.prefix}
    last = answers[-SHAPE.prefixes :]
    return len(stored) == SHAPE.prefixes and all(answer.hits == SHAPE.prefix for answer in last)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL])
def test_after_a_restart_under_load_the_disk_gives_what_device_and_disk_gave(tmp_path: Path, signum: int) -> None:
    """The slowest kernels make computing much slower than loading: only on a very slow disk are loads refused."""
    assert SHAPE.tokens >= 2 * DEVICE_TOKENS
    kernels = "portable" if runnable() else "torch"
    options = ("--kv-memory", "2.5MiB", "--max-model-len", "512", "--kernels", kernels, "--kv-disk", tmp_path / "kv")
    with Server(*options) as server:
        clients = Clients(server.url, SHAPE, 0)
        before = clients.wait(settled)[-SHAPE.prefixes :]
        end(server.process.pid, signum)
        server.process.wait()
        first = next_round(clients.join(), SHAPE)
    with Server(*options) as server:
        after = one_round(server.url, SHAPE, first)
        assert server.metric("pypto:kv_tier_writable") == 1
        refused = server.metric("pypto:kv_tier_refused_fills_total")
        assert server.http.post("/reset_prefix_cache").status_code == 200
        computed = one_round(server.url, SHAPE, first)
    missed = sum(answer.hits for answer in before) - sum(answer.cached["disk"] for answer in after)
    assert missed == 0 or 0 < missed <= refused * SHAPE.prefix < SHAPE.tokens / 2, f"{refused} loads were refused"
    assert any(answer.cached["disk"] for answer in before)
    assert [answer.text for answer in after] == [answer.text for answer in computed]
    assert not any(answer.cached["disk"] for answer in computed)
