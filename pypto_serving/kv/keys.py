"""Content addresses of blocks: a chain of 128-bit keys per request and group."""

from __future__ import annotations

from hashlib import blake2b

from pypto_serving.types.kv import GroupSpec
from pypto_serving.types.tier import KEY_BYTES
from pypto_serving.util import hash128

TOKEN_BYTES = 4


def root_key(group: GroupSpec, fingerprint: bytes, cache_salt: str) -> bytes:
    """Return the parent key of the first block, which differs between models, numerics, groups and tenants."""
    return hash128(fingerprint, group.name.encode(), group.block_size.to_bytes(4, "little"), cache_salt.encode())


class KeyChain:
    """Owns the keys of one sequence in one group, extended as its tokens become known.

    keys[i] = BLAKE2b-128(keys[i - 1] + int32 tokens of [i * B, (i + 1) * B + key_lookahead)), B = block_size.
    """

    __slots__ = ("_group", "_root", "keys")

    def __init__(self, group: GroupSpec, root: bytes) -> None:
        self._group = group
        self._root = root
        self.keys: list[bytes] = []

    def extend(self, tokens: memoryview) -> None:
        """Append the keys that `tokens` (bytes of int32, from position 0 on) determine."""
        size, lookahead = self._group.block_size, self._group.key_lookahead
        num_keys = (len(tokens) // TOKEN_BYTES - lookahead) // size
        keys = self.keys
        for i in range(len(keys), num_keys):
            parent = keys[i - 1] if i else self._root
            content = tokens[i * size * TOKEN_BYTES : ((i + 1) * size + lookahead) * TOKEN_BYTES]
            keys.append(blake2b(parent + content, digest_size=KEY_BYTES).digest())
