"""Keys: what they name, and how much is hashed and looked up for them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pypto_serving.kv import keys
from pypto_serving.kv.events import EventLog
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.kv.promotion import PrefixLoad
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks
from pypto_serving.types.tier import BlockStored, TierConfig, TierInventory
from pypto_serving.util import hash128

LENGTH = 128 * 100
TOKENS = array("i", range(LENGTH + 1))
V4 = deepseek_v4_groups()


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the hashes of links and keys, by "hashes"."""
    counted: Counter[str] = Counter()
    real = keys.blake2b

    def blake2b(data: bytes, **options: Any) -> Any:
        counted["hashes"] += 1
        return real(data, **options)

    monkeypatch.setattr(keys, "blake2b", blake2b)
    yield counted


def manager(groups: tuple[KVCacheGroupSpec, ...], **options: Any) -> KVCacheManager:
    blocks = tuple(1 + live + 200 for live in max_live_blocks(groups, LENGTH + 1, LENGTH + 1))
    return KVCacheManager(groups, blocks, **options)


def compute(kv: KVCacheManager, request_id: str, tokens: array[int], match: int = 0) -> None:
    assert kv.reserve(request_id, len(tokens), match) is not None
    kv.commit(request_id, tokens, len(tokens), len(tokens))


def test_a_match_hashes_no_more_than_that_of_a_plain_model(hashes: Counter[str]) -> None:
    """One link for each 128 tokens; further keys when blocks are published or found."""
    kv = manager(V4)
    assert kv.match("cold", TOKENS) == 0
    assert hashes.pop("hashes") <= 100 + 2, "one link for each 128 tokens, and the first block of another group"
    compute(kv, "cold", TOKENS)
    assert hashes.pop("hashes") <= 4 * 100, "a key for ori, idx and both CSA states at each resume point"
    kv.forget("cold")
    assert kv.match("warm", TOKENS) == LENGTH
    assert hashes.pop("hashes") <= 2 * 100 + 5, "links, idx and one tail"
    compute(kv, "warm", TOKENS, LENGTH)
    kv.check()


def test_decoding_looks_at_groups_only_where_runs_end(hashes: Counter[str]) -> None:
    """Blocks of state change hands every 16 tokens, and a commit has work where the sequence can be resumed."""
    kv = manager(V4)
    tokens = TOKENS[:129]
    kv.match("a", tokens)
    compute(kv, "a", tokens)
    hashes.clear()
    grown = settled = 0
    for length in range(130, 130 + 256):
        tokens.append(length)
        grown += bool(kv.reserve("a", length))
        settled += length >= kv._sequences["a"].due
        kv.commit("a", tokens, length, 129)
    assert (grown, settled) == (1 + 256 // 16, 256 // 128), "the first run begins in its middle"
    assert hashes["hashes"] == 2 * 5
    kv.check()


def test_keys_tell_apart_whatever_is_not_the_same() -> None:
    def found(groups: tuple[KVCacheGroupSpec, ...], fingerprint: bytes = b"", salt: str = "") -> set[bytes]:
        kv = manager(groups, fingerprint=fingerprint)
        kv.match("a", TOKENS[:300], salt)
        return {key for part in kv._sequences["a"].tables for key in part.keys}

    renamed = tuple(msgspec.structs.replace(group, name=f"{group.name}2") for group in V4)
    sets = [found(V4), found(V4, b"other"), found(V4, salt="other"), found(V4[1:]), found(renamed)]
    assert len(sets[0]) == 2 * (3 + 8 + 2 * 32), "no two blocks have one key"
    assert sum(map(len, sets)) == len(set().union(*sets))


@pytest.mark.parametrize("model", ["plain", "deepseek_v4"])
def test_events_of_a_tier_cost_a_match_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier holds blocks that nobody has described. Only those of a request's prefix are looked for, once."""
    groups = plain_groups(128) if model == "plain" else V4
    log = EventLog()
    tier = TierConfig(tier="disk", size_bytes=0, num_slots=(200,) * len(groups))
    kv = manager(groups, tiers=[tier], events=log)
    kv.match("known", TOKENS)
    part = kv._sequences["known"].tables[1 if groups is V4 else 0]
    held = [part.keys[i] for i in range(3)] + [hash128(bytes([i])) for i in range(50)]
    kv.forget("known")
    inventory = TierInventory("disk", pack_ids([part.group.index] * 53), pack_ids(range(53)), b"".join(held))
    kv.open(tuple(group.pool.num_blocks + 1 for group in kv.groups), b"", [inventory])
    log.take()
    looked_up: Counter[str] = Counter()
    monkeypatch.setattr(log, "holds", lambda g, key: looked_up.update(["holds"]) or EventLog.holds(log, g, key))
    monkeypatch.setattr(log, "lacks", lambda g, key: looked_up.update(["lacks"]) or EventLog.lacks(log, g, key))
    assert kv.match("a", TOKENS) == 0 and log.num_unknown == 53
    expected = PrefixLoad.BEGUN if groups is not V4 else PrefixLoad.COMPUTE
    assert kv.load_prefix("a", TOKENS, 0) is expected
    assert looked_up.total() <= 4 + 3 * 6
    stored = [event for event in log.take() if isinstance(event, BlockStored)]
    assert [event.key for event in stored] == held[:3] and log.num_unknown == 50
