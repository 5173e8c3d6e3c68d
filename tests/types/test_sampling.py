"""SamplingParams takes what users may write, and refuses the rest before the engine sees it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams


def test_numbers_of_numpy_and_lists_become_plain_values() -> None:
    params = SamplingParams(
        top_k=np.int64(5), temperature=1, logit_bias={np.int64(5): np.float32(2)}, allowed_token_ids=[1, np.int32(2)]
    )
    assert (params.top_k, params.logit_bias, params.allowed_token_ids) == (5, {5: 2.0}, (1, 2))
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params


def test_none_stands_for_no_adjustment() -> None:
    params = SamplingParams(logit_bias=None, allowed_token_ids=None, stop=None)  # type: ignore[arg-type]
    assert (params.logit_bias, params.allowed_token_ids, params.stop) == ({}, None, ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 5.0},
        {"n": True},
        {"temperature": "1"},
        {"stop": [5]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [5.0]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": range(1025)},
        {"logit_bias": {5.0: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 101}},
        {"logit_bias": [5]},
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
    ],
)
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)
