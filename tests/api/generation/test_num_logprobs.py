"""The log-probabilities of an answer are bounded, which refuses no request that gave none itself."""

from __future__ import annotations

import pytest

from pypto_serving.api.generation.logprobs import MAX_LOGPROBS_OF_ANSWER
from pypto_serving.api.generation.request import FittedPrompt, fit_num_logprobs
from pypto_serving.errors import RequestError
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.sampling import SamplingParams

LONG = FittedPrompt(pack_ids([1]), max_tokens=100_000)
PARAMS = SamplingParams(n=2, logprobs=20)


def test_max_tokens_is_lowered_unless_it_was_asked_for() -> None:
    (fitted,) = fit_num_logprobs([LONG], PARAMS, asked=None)
    assert fitted.max_tokens == MAX_LOGPROBS_OF_ANSWER // (2 * 21)
    with pytest.raises(RequestError, match="send a lower max_tokens"):
        fit_num_logprobs([LONG], PARAMS, asked=100_000)
    assert fit_num_logprobs([LONG], SamplingParams(n=2), asked=100_000) == [LONG]
