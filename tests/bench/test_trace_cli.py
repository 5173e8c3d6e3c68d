"""`bench trace`: what is sent, what is reported, exit codes and one-line errors."""

from __future__ import annotations

import json
import re

import pytest

from pypto_serving.bench.replay import parse_sweep, parse_tokens
from pypto_serving.bench.report import format_tokens
from pypto_serving.bench.traces import EXCERPT, load_trace
from pypto_serving.errors import ConfigError
from tests.bench import command

LINES = (
    {"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [0]},
    {"timestamp": 10, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 20, "input_length": 1088, "output_length": 1, "hash_ids": [1, 2, 3]},
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def invoke(*arguments):
    return command.invoke("trace", *arguments)


def replay(server, path, model, *arguments):
    server.model_card = {"id": model, "vocab_size": 100} | server.model_card
    server.model_card["id"] = model
    return invoke(path, "--base-url", server.url, *arguments)


def test_a_replay_sends_token_ids_with_the_reuse_of_the_trace(server, path):
    result = replay(server, path, "cached")
    assert result.exit_code == 0, result.output
    bodies = sorted(server.bodies, key=lambda body: len(body["prompt"]))
    assert [len(body["prompt"]) for body in bodies] == [64, 1024, 1088]
    assert [body["max_tokens"] for body in bodies] == [2, 3, 1]
    assert bodies[1]["prompt"] == bodies[2]["prompt"][:1024] != bodies[0]["prompt"]
    assert all(body["ignore_eos"] and body["stream"] and max(body["prompt"]) < 100 for body in bodies)


def test_a_replay_reports_hits_beside_the_bound(server, path):
    result = replay(server, path, "cached")
    assert "Successful requests:                     3" in result.stdout
    assert "Cached prompt tokens:                    544" in result.stdout
    assert "Hit rate (%):                            25.00" in result.stdout
    assert "Infinite cache (%):                      47.06" in result.stdout
    assert "from device" not in result.stdout


def test_a_replay_saves_hits_by_tier(server, path, tmp_path):
    where = ("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json")
    result = replay(server, path, "cached_in_tiers", "--speedup", 2, "--scale", "1/2", *where)
    assert result.exit_code == 0, result.output
    assert "  from disk (%):                         25.00" in result.stdout
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["cached_tokens_by_tier"] == {"device": 272, "host": 0, "disk": 272}
    assert (saved["hit_rate"], saved["trace"], saved["scale"], saved["speedup"]) == (0.5, "small.jsonl", "1/2", 2.0)
    assert saved["input_lens"] == [32, 512, 544] and saved["request_rate"] == 300.0


def test_a_server_that_tells_nothing_about_its_cache(server, path):
    result = replay(server, path, "ok")
    assert "Hit rate (%):                            n/a" in result.stdout


def test_failures_are_counted(server, path):
    result = replay(server, path, "server_error")
    assert result.exit_code == 1
    assert "Failed requests:                         3" in result.stdout
    assert "failed: 3 x HTTP 500: the engine died" in result.stderr


def test_requests_beyond_the_window_are_left_out_and_counted(server, path):
    server.model_card["max_model_len"] = 1027
    result = replay(server, path, "cached")
    assert result.exit_code == 0, result.output
    assert sorted(len(body["prompt"]) for body in server.bodies) == [64, 1024]
    assert "warning: 1 of 3 requests are left out: longer than the server's window of 1027 tokens" in result.stderr
    assert "Successful requests:                     2" in result.stdout


def test_a_window_that_holds_no_request_names_a_scale_that_fits(server, path):
    server.model_card["max_model_len"] = 30
    result = replay(server, path, "ok", "--scale", "1/2")
    assert result.exit_code == 2 and not server.bodies
    assert result.stderr == (
        "error: 3 of 3 requests are longer than the server's window of 30 tokens, the longest has 545: "
        "give --scale 1/64, or a server with a larger max-model-len\n"
    )
    assert replay(server, path, "ok", "--scale", "1/64").exit_code == 0


def test_a_replay_without_any_hit_says_what_may_be_wrong(server, path):
    result = replay(server, path, "not_cached", "--scale", "1/32")
    assert result.exit_code == 0, result.output
    assert "warning: nothing came from the KV cache, though" in result.stderr
    assert "at --scale 1/32 a block of the trace has 16 tokens; give a larger --scale" in result.stderr
    assert "nothing came from" not in replay(server, path, "cached").stderr


def test_a_vocabulary_that_the_server_does_not_tell_must_be_given(server, path):
    server.model_card["vocab_size"] = None
    result = replay(server, path, "ok")
    assert result.exit_code == 2 and "give --vocab-size" in result.stderr
    assert replay(server, path, "ok", "--vocab-size", 50).exit_code == 0
    assert max(max(body["prompt"]) for body in server.bodies) < 50


VIRTUAL = ("--virtual", "--scale", "1/16", "--requests", 30, "--device-tokens", "20k")


def test_virtual_time_needs_no_server(tmp_path):
    where = ("--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
    result = invoke(*VIRTUAL, *where)
    assert result.exit_code == 0, result.output
    assert "Successful requests:                     30" in result.stdout
    assert "  from device (%):" in result.stdout and "LRU cache of all tiers' size (%):" in result.stdout
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["backend"] == "virtual" and saved["device_tokens"] == 20_000 and saved["block_size"] == 32
    assert 0 < saved["hit_rate"] <= saved["infinite_hit_rate"]


def test_a_sweep_is_one_table_and_one_file(tmp_path):
    where = ("--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
    result = invoke(*VIRTUAL[:-2], "--sweep", "device=20k,1M", *where)
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()
    columns = ["device tokens", "hit rate", "LRU", "infinite", "median TTFT s", "p99 TTFT s", "output tok/s"]
    assert [name.strip() for name in re.split("  +", head)] == columns
    assert [row.split()[0] for row in rows] == ["20k", "1M"]
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [r["device_tokens"] for r in saved["results"]] == [20_000, 1_000_000]
    assert saved["results"][1]["hit_rate"] == pytest.approx(saved["results"][1]["infinite_hit_rate"], abs=0.002)


def test_a_sweep_of_a_lower_tier_shows_both():
    result = invoke("--virtual", "--scale", "1/16", "--device-tokens", "20k", "--sweep", "host=0,200k")
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()
    assert [name.strip() for name in re.split("  +", head)][:4] == ["host tokens", "hit rate", "device", "host"]
    assert [row.split()[0] for row in rows] == ["0", "200k"]
    assert rows[0].split()[3] == "0.0%" != rows[1].split()[3]


def test_plots(server, path, tmp_path):
    assert replay(server, path, "cached_in_tiers", "--plot", tmp_path / "server.svg").exit_code == 0
    assert replay(server, path, "ok", "--plot", tmp_path / "untold.svg").exit_code == 0
    assert invoke(*VIRTUAL, "--plot", tmp_path / "run.svg").exit_code == 0
    assert invoke(*VIRTUAL, "--sweep", "device=20k,1M", "--plot", tmp_path / "sweep.svg").exit_code == 0
    for name in ("server.svg", "untold.svg", "run.svg", "sweep.svg"):
        assert (tmp_path / name).read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl",), "none.jsonl: No such file"),
        (("--requests", 0), "--requests must be at least 1"),
        (("--duration", -1), "--duration must be a finite number above 0"),
        (("--speedup", 0), "--speedup must be a finite number above 0"),
        (("--scale", "0.3"), "--scale 3/10 makes blocks of 153.6 tokens"),
        (("--seed", -1), "--seed must be at least 0"),
        (("--device-tokens", "1M"), "--device-tokens has no effect on a server; add --virtual"),
        (("--sweep", "device=1M"), "--sweep has no effect on a server; add --virtual"),
        (("--virtual", "--model", "m"), "--model is about a server, and --virtual uses none"),
        (("--virtual", "--device-tokens", "much"), "--device-tokens must be a number of tokens"),
        (("--virtual", "--device-tokens", "1k"), "give at least"),
        (("--virtual", "--host-tokens", "1"), "--host-tokens must be at least 512, got 1"),
        (("--virtual", "--sweep", "device=1M,1k"), "give at least"),
        (("--virtual", "--sweep", "tape=1M"), "--sweep must be TIER=SIZE,SIZE,..."),
        (("--virtual", "--sweep", "device=1M", "--save-result", "--save-detailed"), "--sweep makes several"),
        (("--virtual", "--step-seconds", 0), "--step-seconds must be a finite number above 0"),
        (("--base-url", "http://h", "--port", 1), "--base-url already names the server; drop --port"),
        (("--save-detailed",), "--save-detailed has no effect without --save-result"),
    ],
)
def test_senseless_arguments_are_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_sizes():
    assert parse_sweep("host=1M,2Mi") == ("host", (1_000_000, 1 << 21))
    assert [format_tokens(n) for n in (999, 1500, 20_000, 1_000_000, 2_500_000, 1 << 20)] == [
        "999",
        "1.5k",
        "20k",
        "1M",
        "2.5M",
        "1048.576k",
    ]
    with pytest.raises(ConfigError, match="--x must be a number of tokens"):
        parse_tokens("--x", "")


def test_the_default_trace_is_the_excerpt(tmp_path):
    where = ("--save-result", "--result-dir", tmp_path)
    assert invoke(*VIRTUAL, *where).exit_code == 0
    (saved,) = tmp_path.glob("trace-mooncake_conversation_200-*.json")
    assert json.loads(saved.read_text())["num_prompts"] == 30 < len(load_trace(EXCERPT).requests)
