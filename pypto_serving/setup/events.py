"""Choose the endpoints for KV events and for replaying events that a reader missed."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.rules import MAX_PORT
from pypto_serving.setup.settings import Settings


def choose_events(settings: Settings) -> tuple[str, str]:
    """Choose the endpoints of KV events and of their replay, empty for none; replay is at the next port by default."""
    options = settings.options
    endpoint, replay = options.kv_events or "", options.kv_events_replay or ""
    if replay and not endpoint:
        events = options.label("kv_events", beside="kv_events_replay")
        raise ConfigError(f"{options.label('kv_events_replay')} needs {events}; give it, or drop this")
    if endpoint and options.prefix_caching is False:
        label, off = options.label("kv_events"), options.giving("prefix_caching", False)
        raise ConfigError(f"{label} tells what the prefix cache holds, which is off; drop it or {off}")
    settings.pick_fixed("kv_events")
    reason = settings.origin_or("kv_events_replay", "beside kv-events" if endpoint else "default")
    if endpoint and not replay:
        replay = _next_port(endpoint)
        if not replay:
            beside = options.label("kv_events_replay", beside="kv_events")
            raise ConfigError(f"{options.label('kv_events')} is {endpoint}, so give {beside} as well")
    elif replay and replay == endpoint and not _is_free_port(endpoint):
        label = options.label("kv_events_replay")
        raise ConfigError(f"{label} is {replay}, and so is {options.label('kv_events')}; give another, or drop this")
    settings.record("kv_events_replay", replay or False, reason)
    return endpoint, replay


def _is_free_port(endpoint: str) -> bool:
    """Return whether `endpoint` takes any free port."""
    return endpoint.startswith("tcp:") and endpoint.rpartition(":")[2] in ("*", "0")


def _next_port(endpoint: str) -> str:
    """Return the endpoint beside `endpoint`, empty if that has the last port."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("ipc:"):
        return endpoint + ".replay"
    if _is_free_port(endpoint):
        return endpoint
    return "" if int(port) == MAX_PORT else f"{address}:{int(port) + 1}"
