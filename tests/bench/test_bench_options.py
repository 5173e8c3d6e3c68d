"""Each senseless option value is refused with its name, its value and what to do."""

from __future__ import annotations

import math

import pytest

from pypto_serving.bench.options import (
    RampUp,
    Target,
    Traffic,
    parse_extra_body,
    parse_goodput,
    parse_metadata,
    parse_metrics,
    parse_percentiles,
)
from pypto_serving.errors import ConfigError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Traffic, {"num_prompts": 0}, "--num-prompts must be at least 1, got 0"),
        (Traffic, {"num_warmups": -1}, "--num-warmups must be at least 0, got -1"),
        (Traffic, {"seed": -1}, "--seed must be at least 0, got -1"),
        (Traffic, {"max_concurrency": 0}, "--max-concurrency must be at least 1, got 0"),
        (Traffic, {"max_concurrency": -3}, "--max-concurrency must be at least 1, got -3"),
        (Traffic, {"request_rate": 0}, "--request-rate must be a number above 0 or inf, got 0"),
        (Traffic, {"request_rate": -1.0}, "--request-rate .* got -1.0"),
        (Traffic, {"request_rate": NAN}, "--request-rate .* got nan"),
        (Traffic, {"request_rate": 1.0, "burstiness": 0.0}, "--burstiness must be a finite number above 0"),
        (Traffic, {"request_rate": 1.0, "burstiness": INF}, "--burstiness .* got inf"),
        (Traffic, {"burstiness": 2.0}, "--burstiness shapes the arrivals of a finite --request-rate"),
        (RampUp, {"strategy": "linear", "start_rps": 0, "end_rps": 1}, "--ramp-up-start-rps .* got 0"),
        (RampUp, {"strategy": "linear", "start_rps": 1, "end_rps": NAN}, "--ramp-up-end-rps .* got nan"),
        (RampUp, {"strategy": "linear", "start_rps": 2, "end_rps": 1}, "2 is above --ramp-up-end-rps 1; swap"),
        (Target, {"base_url": "localhost:8000"}, "--base-url must look like http://HOST:PORT"),
        (Target, {"base_url": "http://"}, "--base-url must look like"),
        (Target, {"base_url": "http://host:port"}, "--base-url must look like"),
        (Target, {"base_url": "http://a..b"}, "--base-url must look like"),
        (Target, {"endpoint": "v1/completions"}, "--endpoint must start with a slash"),
        (Target, {"temperature": -0.1}, "--temperature must be a finite number, 0 or above, got -0.1"),
        (Target, {"temperature": NAN}, "--temperature .* got nan"),
        (Target, {"timeout_s": 0}, "--timeout must be a finite number above 0, got 0"),
    ],
)
def test_senseless_values_are_refused(make, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_ramp_up_excludes_a_request_rate():
    ramp_up = RampUp(strategy="linear", start_rps=1, end_rps=2)
    with pytest.raises(ConfigError, match="leave --request-rate out"):
        Traffic(request_rate=3.0, ramp_up=ramp_up)
    assert Traffic(ramp_up=ramp_up, burstiness=2.0).ramp_up is ramp_up


def test_ramp_up_rates():
    linear = RampUp(strategy="linear", start_rps=1, end_rps=9)
    exponential = RampUp(strategy="exponential", start_rps=1, end_rps=9)
    assert [linear.rate(p) for p in (0, 0.5, 1)] == [1, 5, 9]
    assert [exponential.rate(p) for p in (0, 0.5, 1)] == pytest.approx([1, 3, 9])


def test_endpoint_follows_the_backend():
    assert Target().path == "/v1/completions"
    assert Target(backend="openai-chat").path == "/v1/chat/completions"
    assert Target(endpoint="/mine").path == "/mine"


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_metrics, "ttft,latency", "unknown metric 'latency'; there are: ttft, tpot, itl, e2el"),
        (parse_metrics, "", "unknown metric ''"),
        (parse_percentiles, "99,x", "must be numbers such as 50,90,99; got '99,x'"),
        (parse_percentiles, "101", "must lie in 0 to 100, got 101"),
        (parse_percentiles, "nan", "must lie in 0 to 100, got nan"),
        (parse_goodput, ["itl:5"], "unknown metric 'itl'; write KEY:MS with one of ttft, tpot, e2el"),
        (parse_goodput, ["ttft"], "'' is not a number; write ttft:200 for 200 ms"),
        (parse_goodput, ["ttft:0"], "--goodput ttft must be a finite number above 0, got 0"),
        (parse_goodput, ["ttft:nan"], "--goodput ttft .* got nan"),
        (parse_goodput, ["ttft:1", "ttft:2"], "names 'ttft' twice"),
        (parse_metadata, ["tp"], "--metadata must be KEY=VALUE, got 'tp'"),
        (parse_metadata, ["=1"], "--metadata must be KEY=VALUE"),
        (parse_extra_body, "{oops", "--extra-body must be a JSON object"),
        (parse_extra_body, "[1]", "--extra-body must be a JSON object"),
    ],
)
def test_unreadable_values_are_refused(parse, value, message):
    with pytest.raises(ConfigError, match=message):
        parse(value)


def test_readable_values():
    assert parse_metrics("e2el, ttft") == ("ttft", "e2el")
    assert parse_percentiles("99,50,99.9") == (50, 99, 99.9)
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200, "tpot": 50.5}
    assert parse_metadata(["tp=1", "note=a=b"]) == {"tp": "1", "note": "a=b"}
    assert parse_extra_body('{"top_k": 3}') == {"top_k": 3}
