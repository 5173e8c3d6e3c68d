"""Content addresses of blocks: one chain of 128-bit links per sequence, from which each group derives its keys."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pypto_serving.types.kv import GroupSpec
from pypto_serving.types.tier import KEY_BYTES
from pypto_serving.util import hash128

TOKEN_BYTES = 4
VERSION = b"2"
"""Version of the rule for keys. Blocks stored under another version are not found."""


Keys = Sequence[bytes]
"""Keys of the blocks of a sequence in one group, in order of position."""


class KeyChain:
    """Owns the links of one sequence, one for each `step` tokens, extended as its tokens become known.

    links[i] = BLAKE2b-128(links[i - 1] + int32 tokens of [i * step, (i + 1) * step + lag))

    `step` is the distance of resume points. No sequence resumes inside a link, so one hash per link suffices for the
    blocks of all groups. With a chain per group, DeepSeek V4 computed 83 keys per 128 tokens, though at most six of
    them can ever be found. `lag`: the largest number of tokens after a block on which its content depends.
    """

    __slots__ = ("_lag", "_root", "_step", "links")

    def __init__(self, root: bytes, step: int, lag: int) -> None:
        self._root, self._step, self._lag = root, step, lag
        self.links: list[bytes] = []

    def extend(self, tokens: memoryview) -> None:
        """Append the links that `tokens` (bytes of int32, from position 0 on) determine."""
        step, lag, links = self._step * TOKEN_BYTES, self._lag * TOKEN_BYTES, self.links
        parent = links[-1] if links else self._root
        for start in range(len(links) * step, len(tokens) - lag - step + 1, step):
            parent = blake2b(parent + tokens[start : start + step + lag], digest_size=KEY_BYTES).digest()
            links.append(parent)

    def until(self, position: int) -> bytes | None:
        """Return the link of tokens [0, position), or None if it is unknown. A link must end at `position`."""
        last = position // self._step - 1
        return self.links[last] if last < len(self.links) else None


class DerivedKeys(Keys):
    """Keys of one group, computed on demand.

    Block i is block b of link l, where l, b = divmod(i, blocks in a link). Its key is BLAKE2b-128(links[l] + tags[b]).
    """

    __slots__ = ("_known", "_links", "_tags")

    def __init__(self, chain: KeyChain, tags: Sequence[bytes]) -> None:
        self._links, self._tags = chain.links, tags
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._links) * len(self._tags)

    def __getitem__(self, i: int) -> bytes:  # type: ignore[override]  # no slices
        key = self._known.get(i)
        if key is None:
            tags = self._tags
            content = self._links[i // len(tags)] + tags[i % len(tags)]
            key = self._known[i] = blake2b(content, digest_size=KEY_BYTES).digest()
        return key


class KeyRule:
    """Makes the keys of sequences of `groups`. Immutable.

    If a group's blocks are as long as links, the links are its keys; a group that keeps its history is preferred.
    """

    def __init__(self, groups: Sequence[GroupSpec], step: int, lag: int) -> None:
        self._step, self._lag = step, lag
        self._tags = [hash128(group.name.encode(), group.block_size.to_bytes(4, "little")) for group in groups]
        places = [range(step // group.block_size) for group in groups]
        self._tags_in_link = [
            [tag + place.to_bytes(4, "little") for place in each] for tag, each in zip(self._tags, places, strict=True)
        ]
        of_links = [g for g, group in enumerate(groups) if group.block_size == step]
        self._named_by_links = min(of_links, key=lambda g: not groups[g].keeps_history, default=None)

    def keys(self, fingerprint: bytes, cache_salt: str) -> tuple[KeyChain, list[Keys]]:
        """Return an empty chain, and the keys derived from it, by group.

        Keys differ between models, numerics, sets of groups and tenants.
        """
        root = hash128(VERSION, fingerprint, cache_salt.encode(), *self._tags)
        chain = KeyChain(root, self._step, self._lag)
        return chain, [
            chain.links if g == self._named_by_links else DerivedKeys(chain, tags)
            for g, tags in enumerate(self._tags_in_link)
        ]
