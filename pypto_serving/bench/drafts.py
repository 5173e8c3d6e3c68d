"""What a server drafted during a run, from its metrics, with the keys of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

from pypto_serving.bench.client import open_http
from pypto_serving.bench.options import Target

_TIMEOUT_S = 5.0
_DRAFTS = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
_LINE = re.compile(
    rf"vllm:spec_decode_({'|'.join(_DRAFTS)}|num_accepted_tokens_per_pos)(?:_total)?"
    r"""\{(?:[^}]*,)?(?:position="(\d+)")?[^}]*\} (\S+)"""
)


async def read_drafts(target: Target) -> Counter[str | int] | None:
    """Return what the server drafted so far, accepted drafts by position; None if it drafts nothing."""
    http, body = open_http(target), bytearray()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status = await http.exchange(http.encode("GET", "/metrics"), lambda _, data: body.extend(data))
    except OSError:
        return None
    finally:
        http.close()
    return parse_drafts(body.decode(errors="replace")) if status == 200 else None


def parse_drafts(metrics: str) -> Counter[str | int] | None:
    """Return the counters of drafts in the text of /metrics, over all engines; None if it has none."""
    found: Counter[str | int] = Counter()
    for line in metrics.splitlines():
        if match := _LINE.match(line):
            found[match[1] if match[2] is None else int(match[2])] += int(float(match[3]))
    return found if _DRAFTS[0] in found else None


def summarize_drafts(before: Counter[str | int] | None, after: Counter[str | int] | None) -> dict[str, Any]:
    """Return what was drafted in between; nothing for a server that drafts nothing."""
    if before is None or after is None:
        return {}
    rounds, drafted, accepted = (after[name] - before[name] for name in _DRAFTS)
    positions = sorted(key for key in after if isinstance(key, int))
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / rounds if rounds else None,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            (after[at] - before[at]) / rounds if rounds else None for at in positions
        ],
    }
