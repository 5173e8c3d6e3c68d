"""SequenceState: what the KVCacheManager knows of one request."""

from __future__ import annotations

from pypto_serving.kv.lower import GroupKey
from pypto_serving.kv.prefix import KeyChain
from pypto_serving.types.tier import Tier


class SequenceState:
    """Tables and keys of one request. Of its first `settled` tokens, complete blocks are published, and of window and
    state groups those are given back that resuming there does not need.

    Up to `capacity` tokens nothing needs to be reserved, and before `due` computed tokens a commit has nothing to do.
    `held` is the last settled position at which it could be resumed; `tails[g]` are the blocks of window and state
    groups that this needs, which it holds beside its tables. `filled` tokens were, or are being, loaded into its tables
    before it runs; `origins` says from where blocks came that were loaded for it at any time. `asked` is set once
    shared tiers were asked for its blocks. `salted` blocks are not told to those who follow the cache.
    """

    __slots__ = (
        "asked",
        "capacity",
        "chains",
        "due",
        "filled",
        "held",
        "origins",
        "salted",
        "settled",
        "tables",
        "tails",
    )

    def __init__(self, chains: list[KeyChain], salted: bool = False) -> None:
        self.chains = chains
        self.salted = salted
        self.asked = False
        self.origins: dict[GroupKey, Tier] = {}
        self.clear()

    def clear(self) -> None:
        self.tables: list[list[int]] = [[] for _ in self.chains]
        self.capacity = 0
        self.settled = 0
        self.due = 0
        self.held = 0
        self.tails: list[list[int]] = [[] for _ in self.chains]
        self.filled = 0
