"""Routing: which replica computes a request, decided by where its prefix is cached and by who is busy. Does no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pypto_serving.kv.keys import KeyChain
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import publication_lag, resume_step
from pypto_serving.types.stats import StepStats
from pypto_serving.util import ceil_div, hash128

LINK_TOKENS = 128
"""Prefixes are compared in links of at least so many tokens."""
MAX_LINKS = 1 << 17
"""Links remembered for each replica: about 100 bytes each."""
AFFINITY = 8
"""Cost of computing a token again, relative to one that is computed for the first time anywhere.

It delays those that wait behind it, too, and it evicts what others would have hit. In a simulation of Mooncake's
conversation trace over four replicas, 8 gives 0.98 to 0.99 of the hit rate of one cache of the same total size, and the
shortest waits; 1 gives 0.69 to 0.88.
"""


class KnownPrefixes:
    """Owns the links that one replica is believed to hold, those of the last requests that fit its KV memory.

    Asking the cores would be exact, and cost a message each way before a request is admitted. A wrong belief costs one
    computed prefix.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links: OrderedDict[bytes, None] = OrderedDict()

    def count(self, links: Sequence[bytes]) -> int:
        """Return how many of the first links are held."""
        return next((i for i, link in enumerate(links) if link not in self._links), len(links))

    def touch(self, links: Sequence[bytes]) -> None:
        """Remember links as the most recent ones, the first of them last, and forget the oldest beyond the capacity."""
        for link in reversed(links):
            self._links[link] = None
            self._links.move_to_end(link)
        while len(self._links) > self._capacity:
            self._links.popitem(last=False)

    def clear(self) -> None:
        """Forget all links."""
        self._links.clear()


class Work:
    """Owns the work of one replica: prompt tokens of requests without output, and the requests that decode."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.prompt_tokens = 0
        self.decoding: set[str] = set()

    def add(self, request_id: str, num_tokens: int) -> None:
        """Add a request with so many tokens to compute."""
        self.prompts[request_id] = num_tokens
        self.prompt_tokens += num_tokens

    def begin_output(self, request_id: str) -> None:
        """Record the first token of a request."""
        if request_id in self.prompts:
            self._drop_prompt(request_id)
            self.decoding.add(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a request that ended. Ignore unknown ones."""
        self._drop_prompt(request_id)
        self.decoding.discard(request_id)

    def _drop_prompt(self, request_id: str) -> None:
        self.prompt_tokens -= self.prompts.pop(request_id, 0)


class Unfinished(NamedTuple):
    """Where a request is, and the links of its prompt."""

    replica: int
    links: Sequence[bytes]


class Router:
    """Owns what is known of each replica's cache and work.

    A request goes to the replica with the least cost, in prompt tokens:

        AFFINITY x tokens of its prompt that are not cached there
        + tokens of prompts that wait there
        + requests that decode there x mean output / 2 x speed of prefill / speed of decoding

    Speeds are those that the replicas measure, in tokens per second; both count alike until they are. A tie goes to the
    replica that was given the fewest tokens to compute.
    """

    def __init__(self, config: EngineConfig, num_replicas: int) -> None:
        step = resume_step(config.groups)
        self._link_tokens = ceil_div(LINK_TOKENS, step) * step
        self._lag = publication_lag(config.groups)
        self._caching = config.enable_prefix_caching
        capacity = min(MAX_LINKS, _held_tokens(config) // self._link_tokens)
        self._known = [KnownPrefixes(capacity) for _ in range(num_replicas)]
        self._works = [Work() for _ in range(num_replicas)]
        self._given = [0] * num_replicas
        self._has_tiers = bool(config.tiers)
        self._unfinished: dict[str, Unfinished] = {}
        self._num_finished = 0

    def links(self, prompt: bytes, cache_salt: str) -> list[bytes]:
        """Return the links of a prompt, int32 token ids."""
        chain = KeyChain(hash128(cache_salt.encode()), self._link_tokens, self._lag)
        if self._caching:
            chain.extend(memoryview(prompt))
        return chain.links

    def order(self, num_tokens: int, links: Sequence[bytes], stats: Sequence[StepStats]) -> list[int]:
        """Return all replicas for a prompt of `num_tokens`, the best first. `stats` are their newest snapshots."""
        mean_output = sum(each.generation_tokens for each in stats) / max(1, self._num_finished)
        decode_tokens = mean_output / 2 * _speed_ratio(stats)

        def cost(replica: int) -> tuple[float, int]:
            work = self._works[replica]
            missing = self._missing(replica, num_tokens, links)
            return AFFINITY * missing + work.prompt_tokens + len(work.decoding) * decode_tokens, self._given[replica]

        return sorted(range(len(self._works)), key=cost)

    def add(self, replica: int, request_ids: Sequence[str], num_tokens: int, links: Sequence[bytes]) -> None:
        """Record requests with one prompt of `num_tokens` that a replica admitted; it computes the prompt once."""
        missing = self._missing(replica, num_tokens, links)
        for request_id in request_ids:
            self._works[replica].add(request_id, missing)
            self._unfinished[request_id] = Unfinished(replica, links)
            self._given[replica] += missing
            missing = 0
        self._known[replica].touch(links)

    def begin_output(self, request_id: str) -> None:
        """Record the first token of a request. Ignore unknown ones."""
        if (request := self._unfinished.get(request_id)) is not None:
            self._works[request.replica].begin_output(request_id)

    def finish(self, request_id: str) -> None:
        """Record the end of a request. Ignore unknown ones."""
        if (request := self._unfinished.pop(request_id, None)) is not None:
            self._works[request.replica].remove(request_id)
            self._num_finished += 1

    def lose(self, replica: int) -> None:
        """Forget the requests of a replica whose core ended, and what its device held."""
        self._works[replica] = Work()
        self._known[replica].clear()
        self._unfinished = {key: each for key, each in self._unfinished.items() if each.replica != replica}

    def lose_device(self, replica: int) -> None:
        """Forget what the device of a replica held whose worker died, unless tiers have it.

        The next worker computes the prompts of unfinished requests again.
        """
        if not self._has_tiers:
            self._known[replica].clear()
            for request in self._unfinished.values():
                if request.replica == replica:
                    self._known[replica].touch(request.links)

    def clear_caches(self) -> None:
        """Forget what all replicas hold."""
        for known in self._known:
            known.clear()

    def _missing(self, replica: int, num_tokens: int, links: Sequence[bytes]) -> int:
        return max(1, num_tokens - self._known[replica].count(links) * self._link_tokens)


def _speed_ratio(stats: Sequence[StepStats]) -> float:
    """Return the mean speed of prefill over that of decoding, among replicas that measured both."""
    measured = [each for each in stats if each.prefill_per_s and each.decode_per_s]
    if not measured:
        return 1.0
    return sum(each.prefill_per_s for each in measured) / sum(each.decode_per_s for each in measured)


def _held_tokens(config: EngineConfig) -> int:
    """Return how many tokens a replica keeps, on the device and in tiers of a given size."""
    kept = [g for g, group in enumerate(config.groups) if group.keeps_history] or range(len(config.groups))
    tiers = [tier.num_slots for tier in config.tiers if tier.num_slots]
    slots = [config.num_blocks, *tiers]
    return min(sum(each[g] for each in slots) * config.groups[g].block_size for g in kept)
