"""Choose the replica that computes a request, by cached prefixes and load. Does no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pypto_serving.kv.keys import KeyChain
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import publication_lag, resume_step
from pypto_serving.types.request import StepStats
from pypto_serving.util import ceil_div, hash128

LINK_TOKENS = 128
"""Minimum tokens of a link, the unit in which prefixes are compared."""
MAX_LINKS = 1 << 17
"""Limit of links remembered per replica, about 100 bytes each."""
AFFINITY = 8
"""Cost of recomputing a token, relative to a token that is computed for the first time anywhere.

Recomputing also delays later requests, and evicts blocks that others would have hit. In a simulation of Mooncake's
conversation trace over four replicas, 8 gives 0.98 to 0.99 of the hit rate of one cache of the same total size, and the
shortest waits; 1 gives 0.69 to 0.88.
"""


class KnownPrefixes:
    """Owns the links that one replica probably holds: the latest ones, as many as fit its KV memory.

    Asking the cores would be exact, but would cost a round trip before admission. A wrong guess costs recomputing one
    prefix.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links: OrderedDict[bytes, None] = OrderedDict()

    def count_held(self, links: Sequence[bytes]) -> int:
        """Return how many links are held, from the first on without a gap."""
        return next((i for i, link in enumerate(links) if link not in self._links), len(links))

    def touch(self, links: Sequence[bytes]) -> None:
        """Mark links as most recently used, the first link last; forget the oldest beyond the capacity."""
        for link in reversed(links):
            self._links[link] = None
            self._links.move_to_end(link)
        while len(self._links) > self._capacity:
            self._links.popitem(last=False)

    def forget_all(self) -> None:
        """Forget all links."""
        self._links.clear()


@dataclass(slots=True)
class _Unfinished:
    """An unfinished request: its replica, the links of its prompt, and the prompt tokens to compute."""

    replica: int
    links: Sequence[bytes]
    num_tokens: int
    decodes: bool = False


class _Load:
    """The load of one replica: prompt tokens of requests without output, decoding requests, total tokens assigned."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.num_decoding = 0
        self.given_tokens = 0


class Router:
    """Owns the known cache content and load of each replica.

    A request goes to the replica with the least cost, in prompt tokens:

        AFFINITY x tokens of its prompt that are not cached there
        + tokens of prompts that wait there
        + requests that decode there x mean output / 2 x speed of prefill / speed of decoding

    Replicas measure both speeds, in tokens per second; before that, their ratio is 1. A tie goes to the replica to
    which the fewest tokens were assigned.
    """

    def __init__(self, config: EngineConfig, num_replicas: int) -> None:
        step = resume_step(config.cache.groups)
        self._link_tokens = ceil_div(LINK_TOKENS, step) * step
        self._lag = publication_lag(config.cache.groups)
        self._caching = config.cache.enable_prefix_caching
        capacity = min(MAX_LINKS, _held_tokens(config) // self._link_tokens)
        self._known = [KnownPrefixes(capacity) for _ in range(num_replicas)]
        self._loads = [_Load() for _ in range(num_replicas)]
        self._has_tiers = bool(config.cache.tiers)
        self._unfinished: dict[str, _Unfinished] = {}
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
            load = self._loads[replica]
            missing = self._missing(replica, num_tokens, links)
            return AFFINITY * missing + load.prompt_tokens + load.num_decoding * decode_tokens, load.given_tokens

        return sorted(range(len(self._loads)), key=cost)

    def add_requests(self, replica: int, request_ids: Sequence[str], num_tokens: int, links: Sequence[bytes]) -> None:
        """Record admitted requests that share one prompt of `num_tokens`, which the replica computes once."""
        load, missing = self._loads[replica], self._missing(replica, num_tokens, links)
        load.prompt_tokens += missing
        load.given_tokens += missing
        for request_id in request_ids:
            self._unfinished[request_id] = _Unfinished(replica, links, missing)
            missing = 0
        self._known[replica].touch(links)

    def begin_output(self, request_id: str) -> None:
        """Record the first token of a request. Ignore unknown requests."""
        if (request := self._unfinished.get(request_id)) is not None and not request.decodes:
            request.decodes = True
            self._loads[request.replica].prompt_tokens -= request.num_tokens
            self._loads[request.replica].num_decoding += 1

    def finish(self, request_id: str) -> None:
        """Record the end of a request. Ignore unknown requests."""
        if request_id in self._unfinished:
            self.begin_output(request_id)
            self._loads[self._unfinished.pop(request_id).replica].num_decoding -= 1
            self._num_finished += 1

    def lose(self, replica: int) -> None:
        """Forget the requests of a replica whose core ended, and the links on its device."""
        self._loads[replica].prompt_tokens = self._loads[replica].num_decoding = 0
        self._known[replica].forget_all()
        self._unfinished = {key: each for key, each in self._unfinished.items() if each.replica != replica}

    def lose_device(self, replica: int) -> None:
        """Forget the links on the device of a replica whose worker died, unless it has lower tiers.

        The next worker computes the prompts of unfinished requests again.
        """
        if not self._has_tiers:
            self._known[replica].forget_all()
            for request in self._unfinished.values():
                if request.replica == replica:
                    self._known[replica].touch(request.links)

    def clear_caches(self) -> None:
        """Forget the links of all replicas."""
        for known in self._known:
            known.forget_all()

    def _missing(self, replica: int, num_tokens: int, links: Sequence[bytes]) -> int:
        return max(1, num_tokens - self._known[replica].count_held(links) * self._link_tokens)


def _speed_ratio(stats: Sequence[StepStats]) -> float:
    """Return the mean ratio of prefill speed to decoding speed, over replicas that have measured both."""
    measured = [each for each in stats if each.prefill_per_s and each.decode_per_s]
    if not measured:
        return 1.0
    return sum(each.prefill_per_s for each in measured) / sum(each.decode_per_s for each in measured)


def _held_tokens(config: EngineConfig) -> int:
    """Return how many tokens a replica can hold, on the device and in tiers of known size."""
    kept = [g for g, group in enumerate(config.cache.groups) if group.keeps_history] or range(len(config.cache.groups))
    tiers = [tier.num_slots for tier in config.cache.tiers if tier.num_slots]
    slots = [config.cache.num_blocks, *tiers]
    return min(sum(each[g] for each in slots) * config.cache.groups[g].block_size for g in kept)
