"""Compute the hit rates of an LRU cache of 512-token blocks on a trace in Mooncake's format, without engine code.

    python benchmarks/trace_lru.py mooncake_conversation.jsonl 1M 4M 16M

Requests run one after the other, in the order of the file; N tokens are N // 512 blocks. A request hits its blocks up
to the first one that is not cached; then all of its blocks become the most recent ones, in order. Outputs take no room,
and nothing is pinned.

| column | hits                                               | divided by                           |
|--------|----------------------------------------------------|--------------------------------------|
| blocks | blocks; a partial last one counts like a whole one | all blocks                           |
| tokens | tokens of whole blocks, except a prompt's last     | all prompt tokens; the upper bound   |
|        | token, which must be computed for its logits       | for an engine with 512-token blocks  |
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

BLOCK = 512
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


def hit_rates(requests: list[dict[str, Any]], capacity: float) -> tuple[float, float]:
    """Return the shares of blocks and tokens that hit in a cache of `capacity` tokens, which may be infinite."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = 0
    for request in requests:
        ids = request["hash_ids"]
        hits = 0
        while hits < len(ids) and ids[hits] in cache:
            hits += 1
        hit_blocks += hits
        hit_tokens += min(hits, (request["input_length"] - 1) // BLOCK) * BLOCK
        for block in ids:
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity // BLOCK:
            cache.popitem(last=False)
    num_blocks = sum(len(request["hash_ids"]) for request in requests)
    return hit_blocks / num_blocks, hit_tokens / sum(request["input_length"] for request in requests)


def main(path: str, *sizes: str) -> None:
    """Print a table with a line per size and one for an infinite cache."""
    requests = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print(f"{'cache':>8}  {'blocks':>6}  {'tokens':>6}")
    for size in (*sizes, "infinite"):
        capacity = math.inf if size == "infinite" else float(size.rstrip("kMG")) * UNITS.get(size[-1], 1)
        blocks, tokens = hit_rates(requests, capacity)
        print(f"{size:>8}  {blocks:>6.1%}  {tokens:>6.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
