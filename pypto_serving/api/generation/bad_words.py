"""Turn bad words into the token sequences that must not appear."""

from __future__ import annotations

import msgspec

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams


def encode_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return parameters whose `bad_word_ids` hold the `bad_words` too, each encoded with and without a space before.

    Raises RequestError if they have too many tokens, or if there is no tokenizer.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise RequestError("bad_words needs a tokenizer, which this model lacks; leave it out", param="bad_words")
    words = [word.lstrip() for word in params.bad_words]
    found = [tuple(tokenizer.encode(text, False)) for word in words for text in (word, " " + word)]
    sequences = tuple(dict.fromkeys(filter(None, [*params.bad_word_ids, *found])))
    return msgspec.structs.replace(params, bad_words=(), bad_word_ids=sequences)
