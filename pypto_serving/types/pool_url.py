"""The address of a store that replicas share."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from pypto_serving.util import parse_size

POOL_PARAMETERS = ("metadata_server", "protocol", "device", "local_hostname", "segment_size")


def parse_pool_url(url: str) -> tuple[str, int | None, dict[str, str]]:
    """Host, port and parameters of `mooncake://HOST[:PORT][?NAME=VALUE&...]`. Raises ValueError."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.scheme != "mooncake" or not parts.hostname or parts.path.strip("/") or parts.fragment:
        raise ValueError(f"{url} is no address of a pool")
    if not given.keys() <= set(POOL_PARAMETERS):
        raise ValueError(f"{url} has unknown parameters")
    parse_size(given.get("segment_size", "0"))
    return parts.hostname, parts.port, given
