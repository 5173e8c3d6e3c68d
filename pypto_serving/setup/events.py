"""Choose the endpoints for KV events and for replaying events that a reader missed."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.setup.rules import MAX_PORT
from pypto_serving.setup.settings import Settings
from pypto_serving.types.config import EngineConfig, ServerConfig


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
    elif replay and _clash(replay, endpoint):
        raise _taken(options, "kv_events_replay", replay, options.label("kv_events"))
    settings.record("kv_events_replay", replay or False, reason)
    return endpoint, replay


def check_ports(options: Options, engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if KV events or their replay would take the port of the HTTP server."""
    http = f"tcp://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    for name in ("kv_events", "kv_events_replay"):
        if _clash(getattr(engine, name), http):
            raise _taken(options, name, getattr(engine, name), options.label("port"))


def _taken(options: Options, name: str, endpoint: str, other: str) -> ConfigError:
    return ConfigError(f"{options.label(name)} is {endpoint}, where {other} listens too; give another")


def _clash(one: str, other: str) -> bool:
    """Return whether two endpoints cannot both be bound: one path, or the same port of the same address, or of any."""
    if one == other:
        return not _is_free_port(one)
    (address, port), (other_address, other_port) = _parts(one), _parts(other)
    return port == other_port != 0 and (address == other_address or "*" in (address, other_address))


def _parts(endpoint: str) -> tuple[str, int]:
    """Return address and port of a TCP endpoint; `*` is any address, and port 0 any free one, or no TCP."""
    if not endpoint.startswith("tcp:") or _is_free_port(endpoint):
        return "", 0
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    address = address.strip("[]").lower()
    return {"0.0.0.0": "*", "::": "*", "localhost": "127.0.0.1"}.get(address, address), int(port)


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
