"""Choose the endpoints for KV events and for replaying events that a reader missed."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.setup.rules import MAX_PORT
from pypto_serving.setup.settings import Settings
from pypto_serving.types.config import EngineConfig, ServerConfig


def choose_events(settings: Settings, num_replicas: int) -> tuple[str, str]:
    """Choose the endpoints of KV events and of their replay for the first replica, empty for none.

    The other replicas have the ports after it. By default, replays have the ports after those of all events.
    """
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
        replay = _beside(endpoint, num_replicas)
        if not replay:
            beside = options.label("kv_events_replay", beside="kv_events")
            raise ConfigError(f"{options.label('kv_events')} is {endpoint}, so give {beside} as well")
    elif replay and _clash_of_replicas(replay, endpoint, num_replicas):
        raise _taken(options, "kv_events_replay", replay, options.label("kv_events"))
    settings.record("kv_events_replay", replay or False, reason)
    return endpoint, replay


def endpoint_of(endpoint: str, index: int) -> str:
    """Return the endpoint of replica `index`, where that of the first is `endpoint`; empty for none."""
    if not endpoint or index == 0 or _is_free_port(endpoint):
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}.{index}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + index}"


def check_ports(options: Options, engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError if KV events of a replica, or their replay, would take the port of the HTTP server."""
    http = f"tcp://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
    for name in ("kv_events", "kv_events_replay"):
        if _clash(getattr(engine.cache, name), http):
            raise _taken(options, name, getattr(engine.cache, name), options.label("port"))


def _taken(options: Options, name: str, endpoint: str, other: str) -> ConfigError:
    return ConfigError(f"{options.label(name)} is {endpoint}, where {other} listens too; give another")


def _clash_of_replicas(one: str, other: str, count: int) -> bool:
    """Return whether endpoints of `count` replicas, the first at `one` and `other`, cannot all be bound."""
    indices = range(count)
    return any(_clash(endpoint_of(one, i), endpoint_of(other, j)) for i in indices for j in indices)


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


def _beside(endpoint: str, num_replicas: int) -> str:
    """Return the endpoint of replays for events at `endpoint`, empty if there are not ports enough."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("ipc:"):
        return endpoint + ".replay"
    if _is_free_port(endpoint):
        return endpoint
    return "" if int(port) + 2 * num_replicas - 1 > MAX_PORT else f"{address}:{int(port) + num_replicas}"
