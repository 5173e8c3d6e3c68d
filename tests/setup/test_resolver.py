"""resolve(): every value has a reason, what is planned fits, and what cannot work is one line that names a flag."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.errors import ConfigError
from pypto_serving.model.null.spec import deepseek_v4_groups
from pypto_serving.setup.host import DiskFacts, HostFacts, read_cache_dir, read_host_facts
from pypto_serving.setup.memory import max_sequence_bytes, plan_groups, tail_bytes
from pypto_serving.setup.memory_planner import largest, size_option
from pypto_serving.setup.options import Options, make_options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.setup.rules import RULES
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec, KVTensorSpec, max_live_blocks
from pypto_serving.types.model import ModelSpec, default_model_name
from pypto_serving.util import GIB, parse_size
from tests.simulation import in_pages

MIB = 1 << 20
HOST = HostFacts(available_bytes=16 * GIB, num_cpus=4)
FULL = KVCacheGroupSpec(
    name="full",
    kind="full",
    block_size=16,
    tensors=(KVTensorSpec(name="kv", layers=(0, 1), dtype="bfloat16", row_shape=(2, 64)),),
)
WINDOW = KVCacheGroupSpec(
    name="window",
    kind="sliding_window",
    block_size=32,
    window=100,
    tensors=(KVTensorSpec(name="kv", layers=(2, 3, 4), dtype="bfloat16", row_shape=(96,)),),
)
STATE = KVCacheGroupSpec(
    name="state",
    kind="rolling_state",
    block_size=4,
    period=8,
    overlap=4,
    tensors=(KVTensorSpec(name="state", layers=(0,), dtype="float32", row_shape=(32,)),),
)
GROUPS = ((FULL,), (FULL, WINDOW), (STATE, FULL, WINDOW), (WINDOW,))


def make_model(groups: tuple[KVCacheGroupSpec, ...] = (FULL,), **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "path": "models/small",
        "architecture": "Small",
        "dtype": "bfloat16",
        "num_layers": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "num_parameters": 10**6,
        "weight_bytes": 2 * 10**6,
    }
    return ModelSpec(kv_groups=groups, **{**values, **changes})


def make_resolved(model: ModelSpec | None = None, facts: HostFacts = HOST, /, **options: Any) -> Resolved:
    return resolve(Options(**options), model or make_model(), facts)


def setting(resolved: Resolved, name: str) -> tuple[Any, str]:
    return next((s.value, s.reason) for s in resolved.settings if s.name == name)


def test_defaults_on_cpu() -> None:
    engine = make_resolved().engine
    assert (engine.backend, engine.max_num_batched_tokens, engine.max_num_seqs) == ("cpu", 512, 256)
    assert (engine.max_model_len, engine.max_queued_requests, engine.num_threads) == (4096, 4096, 1)
    assert engine.enable_prefix_caching
    assert engine.enable_chunked_prefill


def test_every_option_is_a_setting_with_a_reason() -> None:
    resolved = make_resolved()
    assert [s.name.replace("-", "_") for s in resolved.settings] == list(RULES)
    assert all(s.reason for s in resolved.settings)


def test_default_server_is_local_and_open() -> None:
    server = make_resolved().server
    assert (server.host, server.port, server.api_key) == ("127.0.0.1", 8000, None)
    assert server.served_model_names == ("small",)


def test_api_keys_are_not_shown() -> None:
    resolved = make_resolved(api_key="secret")
    assert resolved.server.api_key == "secret"
    assert setting(resolved, "api-key") == ("set", "given by --api-key")


def test_kv_is_half_of_what_is_free() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20))
    memory = resolved.memory
    room = memory.available_bytes - memory.weight_bytes - memory.workspace_bytes
    assert room // 2 - FULL.block_bytes < memory.kv_bytes <= room // 2
    assert setting(resolved, "kv-memory")[1] == "half of 16 GiB free less weights and workspace"


def test_kv_is_no_more_than_the_model_can_use() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=64), max_num_seqs=3)
    assert resolved.engine.num_blocks == (1 + 3 * 4,)
    assert "no more than 3 sequences of 64 tokens" in setting(resolved, "kv-memory")[1]


def test_one_full_group_takes_all_of_its_memory() -> None:
    resolved = make_resolved(kv_memory="100MiB", max_model_len=1000)
    assert resolved.engine.num_blocks == (100 * MIB // FULL.block_bytes,)


def test_kv_memory_as_a_share_of_free_memory() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20), kv_memory="0.25")
    assert resolved.engine.num_blocks == (4 * GIB // FULL.block_bytes,)
    assert setting(resolved, "kv-memory")[1] == "given by --kv-memory: 0.25 of 16 GiB free"


@given(
    groups=st.sampled_from([*GROUPS, deepseek_v4_groups(), in_pages(deepseek_v4_groups(), 128)]),
    given_bytes=st.integers(0, 4 * GIB),
    model_len=st.integers(1, 1 << 20),
    step_tokens=st.integers(1, 4096),
    max_num_seqs=st.integers(1, 1000),
)
def test_groups_share_what_there_is(
    groups: tuple[KVCacheGroupSpec, ...], given_bytes: int, model_len: int, step_tokens: int, max_num_seqs: int
) -> None:
    """One sequence of full length always fits; windows and states of others get up to half before history does."""
    least = max_sequence_bytes(groups, model_len, step_tokens)
    kv_bytes = least + given_bytes
    plans = plan_groups(groups, kv_bytes, model_len, step_tokens, 2, max_num_seqs)
    assert sum(plan.total_bytes for plan in plans) <= kv_bytes
    assert all(plan.num_sequences >= 1 for plan in plans)
    tails = tail_bytes(groups, model_len, 2)
    share = min(kv_bytes // 2, given_bytes)
    for plan in plans:
        if not plan.keeps_history:
            assert plan.num_sequences >= min(max_num_seqs, 1 + share // tails)
    if given_bytes // 2 > max_num_seqs * (tails + least):
        assert all(plan.num_sequences >= max_num_seqs for plan in plans)


def test_what_sequences_do_not_hold_is_for_history_and_its_checkpoints() -> None:
    full, window, state = plan_groups((FULL, WINDOW, STATE), GIB, 2048, 512, 2, max_num_seqs=16)
    assert full.num_blocks == 1 + 16 * full.first_blocks
    assert window.num_blocks > 1 + window.first_blocks + 15 * window.more_blocks
    assert state.num_blocks > 1 + state.first_blocks + 15 * state.more_blocks


def test_a_length_that_is_chosen_leaves_room_for_windows_and_states_of_others() -> None:
    groups = deepseek_v4_groups()
    resolved = make_resolved(make_model(groups, max_position_embeddings=1 << 20), kv_memory="2GiB")
    assert 2 <= resolved.engine.max_model_len < 1 << 20
    count, tokens = resolved.memory.share(resolved.engine.max_num_seqs, resolved.engine.max_model_len)
    assert count > 30 and tokens > 0


def test_tables_for_every_position_are_planned() -> None:
    without, tables = (make_resolved(make_model(position_bytes=size)).memory for size in (0, 1024))
    assert tables.workspace_bytes == without.workspace_bytes + 4096 * 1024


def test_longest_length_that_fits_is_the_default() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20), kv_memory="10MiB")
    usable = 10 * MIB // FULL.block_bytes - 1
    assert resolved.engine.max_model_len == usable * 16
    assert "the longest that fits the KV memory" in setting(resolved, "max-model-len")[1]


def test_without_chunks_a_step_holds_a_whole_prompt() -> None:
    resolved = make_resolved(chunked_prefill=False)
    assert resolved.engine.max_num_batched_tokens == resolved.engine.max_model_len == 4096
    assert "chunked prefill is off" in setting(resolved, "max-num-batched-tokens")[1]


def test_without_chunks_a_given_budget_limits_the_length() -> None:
    resolved = make_resolved(chunked_prefill=False, max_num_batched_tokens=600)
    assert (resolved.engine.max_num_batched_tokens, resolved.engine.max_model_len) == (600, 600)


def test_null_backend_needs_no_memory() -> None:
    tiny = HostFacts(available_bytes=MIB, num_cpus=1)
    resolved = make_resolved(make_model(weight_bytes=10 * GIB), tiny, backend="null", kv_memory="2GiB")
    assert resolved.memory.weight_bytes == resolved.memory.workspace_bytes == 0


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
    ({"backend": "tpu"}, "--backend is tpu, but must be one of cpu, null"),
    ({"kv_memory": "0"}, "--kv-memory is 0, but must be a size such as 2GiB"),
    ({"kv_memory": "-1GiB"}, "--kv-memory is -1GiB, but must be a size"),
    ({"kv_memory": "nan"}, "--kv-memory is nan, but must be a size"),
    ({"kv_memory": "9" * 400 + "GiB"}, "--kv-memory is 999"),
    ({"kv_memory": "40GiB"}, "--kv-memory is 40 GiB, but weights take"),
    ({"kv_memory": "0.999"}, "give at most"),
    ({"kv_memory": "10KiB"}, "too little for one sequence of 2 tokens, the shortest there is, which needs"),
    ({"kv_memory": "1MiB", "max_model_len": 4000}, "give --max-model-len 2032 or less or --kv-memory 2008KiB or more"),
    ({"step_timeout": 0}, "--step-timeout is 0, but must be a number of seconds above 0"),
    ({"drain_timeout": "inf"}, "--drain-timeout is inf, but must be a number of seconds from 0"),
    ({"prefix_caching": "maybe"}, "--prefix-caching is maybe, but must be true or false"),
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


def test_weights_that_do_not_fit_name_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"too little memory: weights take 20 GiB .* give --dtype bfloat16"):
        make_resolved(make_model(weight_bytes=20 * GIB, dtype="float32"))
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens or --max-num-seqs"):
        make_resolved(make_model(weight_bytes=16 * GIB - MIB))


@pytest.mark.parametrize("options", [{"kv_memory": "1MiB", "max_model_len": 4000}, {"kv_memory": "50KiB"}])
def test_following_the_advice_works(options: dict[str, Any]) -> None:
    model = make_model((STATE, FULL, WINDOW))
    with pytest.raises(ConfigError) as caught:
        make_resolved(model, **options)
    for name, value in re.findall(r"--([a-z-]+) (\w+) or (?:less|more)", str(caught.value)):
        make_resolved(model, **{**options, name.replace("-", "_"): value})


VALUES = {
    "backend": st.sampled_from(["cpu", "null"]),
    "max_model_len": st.integers(-1, 5000),
    "max_num_seqs": st.integers(0, 70000),
    "max_num_batched_tokens": st.integers(0, 10000),
    "long_prefill_token_threshold": st.integers(-1, 5000),
    "chunked_prefill": st.booleans(),
    "kv_memory": st.one_of(st.integers(-1, 20 * GIB), st.floats(), st.sampled_from(["3MiB", "0.5", "x", "1e12"])),
    "num_threads": st.integers(0, 2000),
    "served_model_name": st.lists(st.text(max_size=3), max_size=3),
    "host": st.text(max_size=5),
}


@given(
    options=st.fixed_dictionaries({}, optional=VALUES),
    groups=st.sampled_from(GROUPS),
    available=st.integers(0, 40 * GIB),
    weights=st.integers(0, 20 * GIB),
    longest=st.integers(1, 1 << 21),
)
def test_any_options_fit_or_are_refused_in_one_line(
    options: dict[str, Any], groups: tuple[KVCacheGroupSpec, ...], available: int, weights: int, longest: int
) -> None:
    model = make_model(groups, weight_bytes=weights, max_position_embeddings=longest)
    try:
        resolved = make_resolved(model, HostFacts(available_bytes=available, num_cpus=2), **options)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    check_consistency(resolved, longest)


def check_consistency(resolved: Resolved, longest: int) -> None:
    engine, memory = resolved.engine, resolved.memory
    assert engine.backend == "null" or memory.total_bytes <= memory.available_bytes
    assert 1 <= engine.max_model_len <= longest
    assert engine.enable_chunked_prefill or engine.max_num_batched_tokens >= engine.max_model_len
    step_tokens = min(engine.max_num_batched_tokens, engine.max_model_len) * engine.depth
    first = max_live_blocks(engine.groups, engine.max_model_len, step_tokens)
    for group, blocks, live in zip(engine.groups, engine.num_blocks, first, strict=True):
        assert live <= blocks - 1 and (blocks - 1 <= live * engine.max_num_seqs or not group.keeps_history)
        assert blocks * group.block_size <= 2**31


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_largest_is_a_bisection(threshold: int, high: int) -> None:
    assert largest(lambda n: n <= threshold, high) == min(threshold, high)


@given(st.integers(1, 1 << 50))
def test_size_option_rounds_the_way_it_is_asked_to(num_bytes: int) -> None:
    assert parse_size(size_option(num_bytes)) <= num_bytes <= parse_size(size_option(num_bytes, up=True))


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
    import msgspec

    engine = make_resolved(make_model((STATE, FULL, WINDOW))).engine
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineConfig) == engine
    assert json.loads(msgspec.json.encode(engine))["num_blocks"] == list(engine.num_blocks)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_host_facts_respect_the_tightest_control_group(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 999 kB\nMemAvailable:    4096 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/box\n")
    box = tmp_path / "sys/fs/cgroup/pod/box"
    write(box / "memory.max", "max\n")
    write(box.parent / "memory.max", str(3 * MIB))
    write(box.parent / "memory.current", str(2 * MIB))
    write(box.parent / "memory.stat", f"anon 1\ninactive_file {MIB}\n")
    write(box.parent / "cpu.max", "100000 100000\n")
    assert read_host_facts(tmp_path) == HostFacts(available_bytes=2 * MIB, num_cpus=1)


def test_packed_weights_are_kept_if_asked_for() -> None:
    host = msgspec.structs.replace(HOST, kernels=("avx2", "portable"), cache_dir="/home/me/.cache/pypto-serving")
    model = make_model(needs_torch="")
    kept = make_resolved(model, host, packed_cache=True)
    assert kept.engine.packed_cache == host.cache_dir
    assert setting(kept, "packed-cache") == (host.cache_dir, "given by --packed-cache")
    for options, reason in (
        ({}, "default"),
        ({"packed_cache": False}, "given by --packed-cache"),
        ({"packed_cache": True, "kernels": "torch"}, "only weights packed for the CPU kernels are kept"),
        ({"packed_cache": True, "backend": "null"}, "only weights packed for the CPU kernels are kept"),
    ):
        resolved = make_resolved(model, host, **options)
        assert (resolved.engine.packed_cache, setting(resolved, "packed-cache")) == ("", (False, reason))
    homeless = make_resolved(model, msgspec.structs.replace(host, cache_dir=""), packed_cache=True)
    assert homeless.engine.packed_cache == ""
    assert "set XDG_CACHE_HOME" in setting(homeless, "packed-cache")[1]


def test_the_cache_folder_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for wanted, folder in (("/var/cache", "/var/cache"), ("", "/home/me/.cache"), ("relative", "/home/me/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", wanted)
        assert read_cache_dir() == f"{folder}/pypto-serving"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert read_cache_dir() == "/home/me/.cache/pypto-serving"


def test_host_facts_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable:    4096 kB\n")
    facts = read_host_facts(tmp_path)
    assert facts.available_bytes == 4 * MIB
    assert facts.num_cpus >= 1


def test_small_weights_are_read_by_one_thread_and_large_ones_by_all() -> None:
    assert make_resolved(make_model(weight_bytes=1 << 30)).engine.num_threads == 4
    assert make_resolved(make_model(weight_bytes=80 << 20)).engine.num_threads == 2
    assert make_resolved(make_model(weight_bytes=80 << 20), num_threads=3).engine.num_threads == 3


WITH_KERNELS = HostFacts(available_bytes=16 * GIB, num_cpus=4, kernels=("avx2", "portable"))


def test_kernels_are_the_best_that_serve_the_model() -> None:
    model = make_model(needs_torch="", packed_bytes=10**6)
    assert setting(make_resolved(model, WITH_KERNELS), "kernels") == ("avx2", "the best this machine runs")
    assert make_resolved(model, WITH_KERNELS, kernels="portable").engine.kernels == "portable"
    assert make_resolved(model, WITH_KERNELS, kernels="torch").engine.kernels == "torch"
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
    assert (resolved.engine.kv_events, resolved.engine.kv_events_replay) == (endpoint, replay)
    chosen = make_resolved(kv_events=endpoint, kv_events_replay="tcp://127.0.0.1:1").engine
    assert (chosen.kv_events, chosen.kv_events_replay) == (endpoint, "tcp://127.0.0.1:1")


def test_kv_events_are_off_by_default() -> None:
    engine = make_resolved().engine
    assert (engine.kv_events, engine.kv_events_replay) == ("", "")


@pytest.mark.parametrize("endpoint", ["5557", "tcp://127.0.0.1", "tcp://a:65536", "udp://a:1", "tcp://a b:1", "ipc://"])
def test_an_endpoint_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-events is .*, but must be a ZeroMQ endpoint such as tcp://"):
        make_resolved(kv_events=endpoint)


def test_kv_events_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-events-replay needs --kv-events"):
        make_resolved(kv_events_replay="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--kv-events tells what the prefix cache holds, which is off"):
        make_resolved(kv_events="tcp://127.0.0.1:1", prefix_caching=False)
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
    (tier,) = make_resolved(kv_remote=url).engine.tiers
    assert (tier.tier, tier.place) == ("remote", url)


def test_a_configuration_with_tiers_for_groups_of_all_kinds_passes_every_wire() -> None:
    model = make_model(deepseek_v4_groups(), max_position_embeddings=8192)
    host = msgspec.structs.replace(HOST, kv_disk=DiskFacts(free_bytes=1 << 40))
    config = make_resolved(model, host, kv_disk="/kv", kv_host_memory="1GiB").engine
    assert [tier.num_slots[3] for tier in config.tiers] == [1, 1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
