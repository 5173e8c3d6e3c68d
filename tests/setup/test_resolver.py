"""resolve(): every value has a reason, and what cannot work is one line that names a flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.model.null_models import deepseek_v4_groups
from pypto_serving.setup.host import DiskFacts
from pypto_serving.setup.option_table import RULES
from pypto_serving.setup.options import Options, make_options
from pypto_serving.setup.resolver import resolve
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.model import default_model_name
from tests.setup.small import FULL, HOST, STATE, WINDOW, WITH_KERNELS, make_model, make_resolved, setting


def test_defaults_on_cpu() -> None:
    engine = make_resolved().engine
    assert (engine.worker.backend, engine.limits.max_num_batched_tokens, engine.limits.max_num_seqs) == (
        "cpu",
        512,
        256,
    )
    assert (engine.limits.max_model_len, engine.scheduler.max_queued_requests, engine.parallel.num_threads) == (
        4096,
        4096,
        1,
    )
    assert engine.cache.enable_prefix_caching
    assert engine.scheduler.enable_chunked_prefill


def test_every_option_is_a_setting_with_a_reason() -> None:
    resolved = make_resolved()
    assert [s.name.replace("-", "_") for s in resolved.settings] == list(RULES)
    assert all(s.reason for s in resolved.settings)


def test_default_server_is_local_and_open() -> None:
    server = make_resolved().server
    assert (server.host, server.port, server.api_keys) == ("127.0.0.1", 8000, ())
    assert server.served_model_names == ("small",)


def test_priorities_can_be_denied_to_clients() -> None:
    assert make_resolved().server.client_priority
    assert not make_resolved(client_priority=False).server.client_priority


def test_api_keys_are_not_shown() -> None:
    resolved = make_resolved(api_key="secret")
    assert resolved.server.api_keys == ("secret",)
    assert setting(resolved, "api-key") == ("set", "given by --api-key")
    assert setting(make_resolved(api_key=["a", "b"]), "api-key") == ("2 keys", "given by --api-key")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 0}, "--max-num-seqs is 0, but must be a whole number from 1 to 65536"),
    ({"max_num_seqs": "many"}, "--max-num-seqs is many, but must be a whole number from 1 to 65536"),
    ({"max_num_seqs": 70000}, "--max-num-seqs is 70000, but must be"),
    ({"max_num_seqs": True}, "--max-num-seqs is True, but must be a whole number"),
    ({"max_num_batched_tokens": -1}, "--max-num-batched-tokens is -1, but must be a whole number from 1"),
    ({"max_model_len": 1.5}, "--max-model-len is 1.5, but must be a whole number from 2"),
    ({"max_model_len": 4097}, "--max-model-len is 4097, but the model's longest sequence is 4096; give at most 4096"),
    ({"block_size": 24}, "--block-size is 24, but must be a power of two from 1 to 1024"),
    ({"port": 65536}, "--port is 65536, but must be a whole number from 0 to 65535"),
    ({"host": ""}, "--host is empty, but must be text on one line"),
    ({"dtype": "int8"}, "--dtype is int8, but must be one of auto, float32, bfloat16"),
    ({"backend": "tpu"}, "--backend is tpu, but must be one of cpu, npu, cuda, null"),
    ({"kv_memory": "0"}, "--kv-memory is 0, but must be a size with a unit such as 2GiB"),
    ({"kv_memory": "-1GiB"}, "--kv-memory is -1GiB, but must be a size"),
    (
        {"kv_memory": 1.5},
        "--kv-memory is 1.5, but must be a size with a unit such as 2GiB, a whole number of bytes, or",
    ),
    ({"kv_memory": 1.0}, "--kv-memory is 1.0, but must be a size with a unit"),
    ({"kv_memory": "1.0"}, "or a fraction of the free memory, below 1, such as 0.3"),
    ({"kv_memory": "nan"}, "--kv-memory is nan, but must be a size"),
    ({"kv_memory": "9" * 400 + "GiB"}, "--kv-memory is 999"),
    ({"kv_memory": "40GiB"}, "--kv-memory is 40 GiB, but weights take"),
    ({"kv_memory": "0.999"}, "give at most"),
    ({"kv_memory": "10KiB"}, "too little for one sequence of 2 tokens, the shortest there is, which needs"),
    ({"kv_memory": "1MiB", "max_model_len": 4000}, "give --max-model-len 2032 or less or --kv-memory 2008KiB or more"),
    ({"step_timeout": 0}, "--step-timeout is 0, but must be a number of seconds above 0"),
    ({"drain_timeout": "inf"}, "--drain-timeout is inf, but must be a number of seconds from 0"),
    ({"prefix_caching": "maybe"}, "--prefix-caching is maybe, but must be true or false"),
    (
        {"allowed_origins": "not an origin"},
        "--allowed-origins is not an origin, but must be one or more of scheme://host",
    ),
    ({"allowed_origins": ["http://a.example/"]}, "--allowed-origins is ['http://a.example/'], but must be"),
    ({"allowed_origins": "http://a.example/chat"}, "--allowed-origins is http://a.example/chat, but must be"),
    ({"allowed_origins": "a.example"}, "--allowed-origins is a.example, but must be"),
    ({"allowed_origins": "http://a.example:65536"}, "--allowed-origins is http://a.example:65536, but must be"),
    ({"allowed_origins": ["*", "null"]}, "--allowed-origins is ['*', 'null'], but must be"),
    ({"served_model_name": []}, "--served-model-name is [], but must be one or more texts"),
    ({"chunked_prefill": False, "long_prefill_token_threshold": 8}, "drop it or give --chunked-prefill"),
    (
        {"chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 1024},
        "--max-num-batched-tokens is 512, but without chunked prefill a step holds a whole prompt, and --max-model-len",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_resolved(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_of_attention_is_named() -> None:
    model = msgspec.structs.replace(make_model(), window=4096)
    with pytest.raises(ConfigError, match=r"4097, but the model's window of attention is 4096; give at most 4096"):
        make_resolved(model, max_model_len=4097)
    assert setting(make_resolved(model), "max-model-len") == (4096, "the model's window of attention")


def test_flags_win_over_the_file_and_reasons_say_so() -> None:
    options = make_options({"port": 1}, {"port": 2, "max-num-seqs": 3, "seed": None}, "serve.yaml")
    resolved = resolve(options, make_model(), HOST)
    assert setting(resolved, "port") == (1, "given by --port")
    assert setting(resolved, "max-num-seqs") == (3, "given in serve.yaml")
    assert setting(resolved, "seed") == (0, "default")


def test_a_value_of_the_file_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^max-num-seqs in serve.yaml is 0, but must be"):
        make_options({}, {"max_num_seqs": 0}, "serve.yaml")


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    assert Options(kv_disk=tmp_path).kv_disk == str(tmp_path)


def test_origins_are_written_as_browsers_send_them() -> None:
    given = ["HTTP://App.Example:80", "https://a.example:443", "http://[::1]:3000", "chrome-extension://abc", "*"]
    written = ("http://app.example", "https://a.example", "http://[::1]:3000", "chrome-extension://abc", "*")
    assert make_options({"allowed_origins": given}).allowed_origins == written
    assert make_options({"allowed_origins": "http://localhost:3000"}).allowed_origins == ("http://localhost:3000",)


def test_integers_of_numpy_are_integers() -> None:
    options = Options(max_num_seqs=np.int64(4), kv_memory=np.uint64(1 << 30), step_timeout=np.int32(5))
    assert (options.max_num_seqs, options.kv_memory, options.step_timeout) == (4, 1 << 30, 5.0)
    assert type(options.max_num_seqs) is type(options.kv_memory) is int
    for value in (np.float64(4), np.bool_(True), np.array([4, 5])):
        with pytest.raises(ConfigError, match=r"^--max-num-seqs is .*, but must be a whole number"):
            Options(max_num_seqs=value)


def test_device_is_another_name_of_backend() -> None:
    assert make_options({}, {"device": "null"}, "a.yaml").backend == "null"
    assert make_options({"device": "null"}, as_arguments=True).backend == "null"


def test_unknown_options_get_the_closest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max-num-seq' in a.json; did you mean max-num-seqs\?"):
        make_options({}, {"max-num-seq": 1}, "a.json")
    with pytest.raises(ConfigError, match="known are: model, "):
        make_options({}, {"zzz": 1}, "a.json")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/small", "small"),
        ("cache/hub/models--owner--name/snapshots/0123abc", "owner/name"),
        ("plain", "plain"),
    ],
)
def test_default_model_name(path: str, name: str) -> None:
    assert default_model_name(path) == name


def test_engine_config_survives_the_wire() -> None:
    engine = make_resolved(make_model((STATE, FULL, WINDOW))).engine
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineConfig) == engine
    assert json.loads(msgspec.json.encode(engine))["cache"]["num_blocks"] == list(engine.cache.num_blocks)


def test_packed_weights_are_kept_if_asked_for() -> None:
    host = msgspec.structs.replace(HOST, kernels=("avx2", "portable"), cache_dir="/home/me/.cache/pypto-serving")
    model = make_model(needs_torch="")
    kept = make_resolved(model, host, packed_cache=True)
    assert kept.engine.worker.packed_cache == kept.engine.worker.cache_dir == host.cache_dir
    assert setting(kept, "packed-cache") == (host.cache_dir, "given by --packed-cache")
    for options, reason in (
        ({}, "default"),
        ({"packed_cache": False}, "given by --packed-cache"),
        ({"packed_cache": True, "kernels": "torch"}, "only weights packed for the CPU kernels are kept"),
        ({"packed_cache": True, "backend": "null"}, "only weights packed for the CPU kernels are kept"),
    ):
        resolved = make_resolved(model, host, **options)
        assert (resolved.engine.worker.packed_cache, setting(resolved, "packed-cache")) == ("", (False, reason))
    homeless = make_resolved(model, msgspec.structs.replace(host, cache_dir=""), packed_cache=True)
    assert homeless.engine.worker.packed_cache == ""
    assert "set XDG_CACHE_HOME" in setting(homeless, "packed-cache")[1]


def test_small_weights_are_read_by_one_thread_and_large_ones_by_all() -> None:
    assert make_resolved(make_model(weight_bytes=1 << 30)).engine.parallel.num_threads == 4
    assert make_resolved(make_model(weight_bytes=80 << 20)).engine.parallel.num_threads == 2
    assert make_resolved(make_model(weight_bytes=80 << 20), num_threads=3).engine.parallel.num_threads == 3


def test_kernels_are_the_best_that_serve_the_model() -> None:
    model = make_model(needs_torch="", packed_bytes=10**6)
    assert setting(make_resolved(model, WITH_KERNELS), "kernels") == ("avx2", "the best this machine runs")
    assert make_resolved(model, WITH_KERNELS, kernels="portable").engine.worker.kernels == "portable"
    assert make_resolved(model, WITH_KERNELS, kernels="torch").engine.worker.kernels == "torch"
    needy = make_model(needs_torch="it is odd", packed_bytes=10**6)
    assert setting(make_resolved(needy, WITH_KERNELS), "kernels") == ("torch", "it is odd")
    assert setting(make_resolved(model), "kernels")[0] == "torch"


def test_kernels_that_cannot_serve_are_refused_by_name() -> None:
    model = make_model(needs_torch="", packed_bytes=10**6)
    with pytest.raises(ConfigError, match="--kernels is avx512, but this machine runs only avx2, portable"):
        make_resolved(model, WITH_KERNELS, kernels="avx512")
    with pytest.raises(ConfigError, match="--kernels is avx2, but it is odd; change that, or drop it"):
        make_resolved(make_model(needs_torch="it is odd"), WITH_KERNELS, kernels="avx2")


@pytest.mark.parametrize(
    ("endpoint", "replay"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::1]:7", "tcp://[::1]:8"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ipc:///run/kv", "ipc:///run/kv.replay"),
    ],
)
def test_missed_kv_events_are_asked_for_at_the_next_port(endpoint: str, replay: str) -> None:
    resolved = make_resolved(kv_events=endpoint)
    assert (resolved.engine.cache.kv_events, resolved.engine.cache.kv_events_replay) == (endpoint, replay)
    chosen = make_resolved(kv_events=endpoint, kv_events_replay="tcp://127.0.0.1:1").engine
    assert (chosen.cache.kv_events, chosen.cache.kv_events_replay) == (endpoint, "tcp://127.0.0.1:1")


def test_kv_events_are_off_by_default() -> None:
    engine = make_resolved().engine
    assert (engine.cache.kv_events, engine.cache.kv_events_replay) == ("", "")


@pytest.mark.parametrize("endpoint", ["5557", "tcp://127.0.0.1", "tcp://a:65536", "udp://a:1", "tcp://a b:1", "ipc://"])
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-events is .*, but must be a ZeroMQ endpoint such as tcp://"):
        make_resolved(kv_events=endpoint)


def test_kv_events_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-events-replay needs --kv-events"):
        make_resolved(kv_events_replay="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--kv-events shows what the prefix cache holds, which is off"):
        make_resolved(kv_events="tcp://127.0.0.1:1", prefix_caching=False)
    with pytest.raises(
        ConfigError, match=r"^--kv-events-replay is ipc://a, where --kv-events listens too; give another$"
    ):
        make_resolved(kv_events="ipc://a", kv_events_replay="ipc://a")
    assert (
        make_resolved(kv_events="tcp://a:0", kv_events_replay="tcp://a:0").engine.cache.kv_events_replay == "tcp://a:0"
    )
    with pytest.raises(ConfigError, match="so give --kv-events-replay as well"):
        make_resolved(kv_events="tcp://127.0.0.1:65535")


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://[::1",
        "mooncake://a:x",
        "mooncake://a:70000",
        "mooncake://a:1/path",
        "mooncake://a:1?segment_size=much",
        "mooncake://a:1?colour=red",
        "mooncake://a:1?device",
        "redis://a:1",
        "a:1",
        "",
    ],
)
def test_a_pool_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-remote is .*, but must be mooncake://HOST:PORT, .*segment_size"):
        make_resolved(kv_remote=url)


@pytest.mark.parametrize("url", ["mooncake://a", "mooncake://[::1]:7/?protocol=rdma&device=mlx5_0&segment_size=1GiB"])
def test_a_pool_is_a_tier(url: str) -> None:
    (tier,) = make_resolved(kv_remote=url).engine.cache.tiers
    assert (tier.tier, tier.place) == ("remote", url)


def test_a_pool_needs_mooncake() -> None:
    host = msgspec.structs.replace(HOST, mooncake=False)
    with pytest.raises(ConfigError, match=r"^--kv-remote is mooncake://a, which needs Mooncake, .*\[mooncake\]"):
        make_resolved(make_model(), host, kv_remote="mooncake://a")
    assert make_resolved(make_model(), host).engine.cache.tiers == ()


def test_traces_need_opentelemetry() -> None:
    host, url = msgspec.structs.replace(HOST, otel=False), "http://127.0.0.1:4317"
    with pytest.raises(ConfigError, match=rf"^--otlp-traces-endpoint is {url}, but OpenTelemetry is not .*\[otel\]"):
        make_resolved(make_model(), host, otlp_traces_endpoint=url)
    assert make_resolved(make_model(), host).server.otlp_traces_endpoint == ""
    assert make_resolved(otlp_traces_endpoint=url).server.otlp_traces_endpoint == url


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4317", "ftp://a", "http://", "http://a:70000", "http://me:key@a", "http://a b"]
)
def test_where_traces_go_must_be_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="must be the URL of a collector"):
        make_resolved(otlp_traces_endpoint=url)


def test_a_configuration_with_tiers_for_groups_of_all_kinds_passes_every_wire() -> None:
    model = make_model(deepseek_v4_groups(), max_position_embeddings=8192)
    host = msgspec.structs.replace(HOST, kv_disk=DiskFacts(free_bytes=1 << 40))
    config = make_resolved(model, host, kv_disk="/kv", kv_host_memory="1GiB").engine
    assert [tier.num_slots[3] for tier in config.cache.tiers] == [1, 1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
