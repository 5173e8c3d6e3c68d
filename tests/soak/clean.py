"""What a server may have after its clients are gone."""

from __future__ import annotations

import psutil

from tests.e2e.server import Server

SLACK_DESCRIPTORS = 8
"""Connections that abandoned requests have not closed yet."""


def settle(server: Server) -> None:
    """Until no request is left in the engine."""
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") > 0:
        pass


def footprint(server: Server) -> list[tuple[str, int, int]]:
    """Role, resident bytes and descriptors of each process."""
    return [(role_of(process), process.memory_info().rss, process.num_fds()) for process in server.family()]


def role_of(process: psutil.Process) -> str:
    """The module that a child runs; the first process is the API's."""
    return next((part for part in process.cmdline() if part.startswith("pypto_serving.")), "api")


def check_clean(server: Server) -> None:
    settle(server)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("pypto:worker_respawns_total") == 0
    assert server.http.get("/health").status_code == 200
