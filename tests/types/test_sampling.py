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
    names = ("logit_bias", "allowed_token_ids", "stop", "bad_words", "bad_word_ids")
    params = SamplingParams(**dict.fromkeys(names))  # type: ignore[arg-type]
    assert [getattr(params, name) for name in names] == [{}, None, (), (), ()]


def test_arrays_and_switches_of_numpy_become_plain_values() -> None:
    given: dict[str, Any] = {
        "ignore_eos": np.True_,
        "skip_special_tokens": np.False_,
        "stop": np.array(["a", "b"]),
        "stop_token_ids": np.array([3]),
        "allowed_token_ids": np.array([1, 2]),
        "top_p": np.array(0.5),
    }
    params = SamplingParams(**given)
    assert params.ignore_eos is True and params.skip_special_tokens is False and params.top_p == 0.5
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (3,), (1, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


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
        {"logprob_token_ids": [-1], "logprobs": 0},
        {"logprob_token_ids": range(1025), "logprobs": 0},
        {"logprob_token_ids": [1]},
        {"logit_bias": {5.0: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 101}},
        {"logit_bias": [5]},
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
        {"logit_bias": np.zeros(3)},
        {"frequency_penalty": 2.01},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": -3},
        {"presence_penalty": "1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": 101},
        {"bad_words": [5]},
        {"bad_words": ["a", " "]},
        {"bad_words": ["a"] * 129},
        {"bad_words": ["a" * 129]},
        {"bad_word_ids": [5]},
        {"bad_word_ids": [[]]},
        {"bad_word_ids": [[-1]]},
        {"n": None},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": True},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"min_tokens": None},
        {"temperature": None},
        {"temperature": np.True_},
        {"max_tokens": 10**5000},
        {"stop": ""},
        {"stop": b"ab"},
        {"stop": {"a": 1}},
        {"stop": False},
        {"allowed_token_ids": "12"},
        {"allowed_token_ids": {5: 1}},
        {"allowed_token_ids": np.array([[1, 2]])},
    ],
)
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"])
@pytest.mark.parametrize("wrong", ["x", 1, None])
def test_switches_are_booleans(name: str, wrong: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is {wrong!r}, but must be True or False") as caught:
        SamplingParams(**{name: wrong})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("max_tokens", 1.5, "max_tokens is 1.5, but must be a whole number"),
        ("max_tokens", 10**30, f"max_tokens is {10**30}, but must be between 0 and 2147483647 (less_than_equal)"),
        (
            "top_k",
            2**40,
            "top_k is 1099511627776, but must be 0 or -1 (off), or between 1 and 2147483647 (less_than_equal)",
        ),
        ("temperature", 10**400, f"temperature is {'1'.ljust(97, '0')}..., but must be a number that a float can hold"),
        ("top_p", np.array([0.5, 0.6]), "top_p is array([0.5, 0.6]), but must be a number"),
        ("stop", 5, "stop is 5, but must be a string or a list of strings"),
        ("stop", ["a", 5], "stop is ['a', 5], but must be a string or a list of strings"),
        ("stop", "\ud800", "stop is '\\ud800', but must be valid Unicode, without lone surrogates"),
        ("stop", ["a"] * 50, "stop is 50 strings, but must be at most 16 strings"),
        ("stop_token_ids", 5, "stop_token_ids is 5, but must be a list of token ids"),
        ("stop_token_ids", [5, True], "stop_token_ids[1] is True, but must be a whole number"),
        ("allowed_token_ids", 5, "allowed_token_ids is 5, but must be a list of token ids"),
        ("allowed_token_ids", b"ab", "allowed_token_ids is b'ab', but must be a list of token ids"),
        ("frequency_penalty", 2.5, "frequency_penalty is 2.5, but must be between -2 and 2 (less_than_equal)"),
        (
            "repetition_penalty",
            0,
            "repetition_penalty is 0.0, but must be between 0.01 and 100; 1 turns it off (greater_than_equal)",
        ),
        ("bad_words", ["a", ""], "bad_words is ('a', ''), but must be strings that are not empty or white space"),
        ("bad_words", ["a"] * 129, "bad_words is 129 strings, but must be at most 128"),
        ("bad_word_ids", [[5], 7], "bad_word_ids[1] is 7, but must be a list of token ids"),
        ("bad_word_ids", [[5], [7.5]], "bad_word_ids[1][0] is 7.5, but must be a whole number"),
        ("logit_bias", {-1: 1}, "logit_bias contains -1, but must have token ids from 0 to 2147483647"),
        ("logit_bias", {"a": 1}, "logit_bias key is 'a', but must be a whole number"),
        ("logit_bias", {5: 200}, "logit_bias of 5 is 200.0, but must be between -100 and 100"),
        ("logit_bias", [5], "logit_bias is [5], but must be a mapping from token ids to numbers"),
    ],
)
def test_messages_name_field_value_and_bounds(name: str, wrong: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: wrong})
    assert (str(caught.value), caught.value.param) == (message, name)


def test_a_bias_that_no_float_holds_is_refused() -> None:
    with pytest.raises(RequestError, match=r"logit_bias of 5 is 10+\.\.\., but must be a number that a float can hold"):
        SamplingParams(logit_bias={5: 10**400})


def test_bad_words_are_bounded_together() -> None:
    """The sum of their tokens, which a request for 128 short words does not reach."""
    assert SamplingParams(bad_words=["w"] * 128, bad_word_ids=[[5] * 8] * 128).bad_word_ids[0] == (5,) * 8
    with pytest.raises(RequestError, match="bad_words is 1025 tokens long, but must be at most 1024") as caught:
        SamplingParams(bad_word_ids=[[5] * 1025])
    assert caught.value.param == "bad_words"
