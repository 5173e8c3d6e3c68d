"""Two servers and a pool: what one has computed, the other loads; a pool that dies costs hits, never an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, complete
from tests.store.pool import Pool, missing, wait_until

NO_POOL = missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(NO_POOL is not None, reason=str(NO_POOL))]


@pytest.fixture
def pool() -> Iterator[Pool]:
    started = Pool()
    try:
        yield started
    finally:
        started.stop()


def stored(server: Server) -> float:
    return server.metric("pypto:kv_tier_stored_bytes_total")


def test_a_replica_loads_what_another_computed(pool: Pool) -> None:
    """By default the bundled model has blocks of 256 tokens there, 256 KiB."""
    rng = random.Random(1)
    prompt, other = rng.choices(range(32, 127), k=400), rng.choices(range(32, 127), k=400)
    options = ("--kv-memory", "64MiB", "--max-model-len", "1200", "--kv-remote", pool.url)
    with Server(*options) as one, Server(*options) as two:
        first, cached = complete(one, prompt)
        assert cached == {"device": 0, "host": 0, "disk": 0, "remote": 0}
        wait_until(lambda: stored(one) > 0)
        again, cached = complete(two, prompt)
        assert again == first
        assert cached == {"device": 0, "host": 0, "disk": 0, "remote": 256}

        pool.stop()
        one_says, cached = complete(one, other)
        assert cached == {"device": 0, "host": 0, "disk": 0, "remote": 0}
        assert complete(two, other)[0] == one_says
        assert one.http.get("/health").status_code == two.http.get("/health").status_code == 200

        pool.start()
        third = rng.choices(range(32, 127), k=400)
        expected, _ = complete(one, third)
        held = stored(one)

        def stored_again() -> bool:
            complete(one, rng.choices(range(32, 127), k=300), max_tokens=1)
            return stored(one) > held

        wait_until(stored_again)
        assert complete(two, third)[0] == expected
