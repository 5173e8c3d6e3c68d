"""VocabularyBytes: the bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyBytes:
    """The UTF-8 bytes of tokens. Does not change, so any thread may use it."""

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        self._raw = raw
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        decoder = raw.decoder.__getstate__() if raw.decoder is not None else b""
        self._bytes_of = _byte_alphabet() if b'"ByteLevel"' in decoder else None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token: for some tokens part of a character, b"" for unknown ids."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is not None:
            return b"".join(self._bytes_of.get(char) or char.encode() for char in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Map the characters of byte-level BPE to bytes (GPT-2).

    Bytes printable in Latin-1 are their own character; the others take U+0100 upwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)})
    return alphabet
