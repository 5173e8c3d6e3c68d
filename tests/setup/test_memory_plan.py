"""Plan memory: what is planned fits, and every length and size follows from what is free."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.base import StepBuffers
from pypto_serving.errors import ConfigError
from pypto_serving.model.null_models import deepseek_v4_groups
from pypto_serving.sched.admission import require_blocks
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.kv_shares import TRANSFERRED_PART, max_sequence_bytes, plan_groups, resume_bytes
from pypto_serving.setup.locate import BUNDLED
from pypto_serving.setup.memory_planner import PROCESS_BYTES, TOKEN_BYTES, largest, row_bytes, size_option
from pypto_serving.setup.resolver import Resolved
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks
from pypto_serving.types.step import BackendLimits, BackendTraits
from pypto_serving.util import GIB, ceil_div, parse_size
from pypto_serving.worker.batch import RowBatch
from tests.e2e.server import Server
from tests.setup.small import FULL, GROUPS, MIB, STATE, WINDOW, make_model, make_resolved, setting
from tests.simulation import in_pages


def test_kv_is_half_of_what_is_free() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20))
    memory = resolved.memory
    room = memory.available_bytes - memory.weight_bytes - memory.workspace_bytes
    assert room // 2 - FULL.block_bytes < memory.kv_bytes <= room // 2
    assert setting(resolved, "kv-memory")[1] == "half of 16 GiB free less weights and workspace"


def test_kv_is_no_more_than_the_model_can_use() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=64), max_num_seqs=3)
    assert resolved.engine.cache.num_blocks == (1 + 3 * 4,)
    assert "no more than 3 sequences of 64 tokens" in setting(resolved, "kv-memory")[1]


def test_one_full_group_takes_all_of_its_memory() -> None:
    resolved = make_resolved(kv_memory="100MiB", max_model_len=1000)
    assert resolved.engine.cache.num_blocks == (100 * MIB // FULL.block_bytes,)


def test_kv_memory_as_a_share_of_free_memory() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20), kv_memory="0.25")
    assert resolved.engine.cache.num_blocks == (4 * GIB // FULL.block_bytes,)
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
    tails = resume_bytes(groups, model_len, 2)
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
    resolved = make_resolved(
        make_model(groups, max_position_embeddings=1 << 20), kv_memory="2GiB", max_model_len="auto"
    )
    assert 2 <= resolved.engine.limits.max_model_len < 1 << 20
    count, tokens = resolved.memory.share(resolved.engine.limits.max_num_seqs, resolved.engine.limits.max_model_len)
    assert count > 30 and tokens > 0


def test_tables_for_every_position_are_planned() -> None:
    without, tables = (make_resolved(make_model(position_bytes=size)).memory for size in (0, 1024))
    assert tables.workspace_bytes == without.workspace_bytes + 4096 * 1024


@pytest.mark.e2e
def test_processes_take_no_more_than_is_planned() -> None:
    """Once all have had work: the copies of the reader, for grammars and bodies, and the guide."""
    with Server(BUNDLED, "--backend", "null", "--log-level", "error") as server:
        body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        quick, slow = {"type": "integer"}, {"type": "integer", "multipleOf": 20_011}
        for more in ({}, {"guided_json": quick}, {"guided_json": slow}, {"chat_template_kwargs": {"a": "x" * 300_000}}):
            answer = server.http.post("/v1/chat/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
        sizes = [(each.cmdline()[-2:], each.memory_full_info().pss) for each in server.family()]
    assert sum(size for _, size in sizes) < PROCESS_BYTES, sizes


MORE_TOKENS = 20_000
HOLD = """
import resource, sys
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.guidance import Compiler

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

small, large, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
kept = [Tokenizer.load(small), Compiler.of(small, 640, [2])]  # and all that they import
before = resident()
kept.append(Tokenizer.load(large))
between = resident()
kept.append(Compiler.of(large, size, [2]))
print(between - before, resident() - between)
"""


def test_vocabularies_that_processes_hold_are_planned(tmp_path: Path) -> None:
    """The API process and the two copies of the reader for bodies hold a tokenizer, the guide what grammars need."""
    made = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    joined = {a + b: [a, b] for a, b in itertools.product(list(vocab), repeat=2) if a + b not in vocab}
    for token, parts in itertools.islice(joined.items(), MORE_TOKENS):
        vocab[token] = len(vocab)
        merges.append(parts)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    command = [sys.executable, "-P", "-c", HOLD, str(BUNDLED), str(tmp_path), str(len(vocab))]
    tokenizer, compiler = map(int, subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split())
    assert TOKEN_BYTES / 2 < (3 * tokenizer + compiler) / MORE_TOKENS < TOKEN_BYTES, (tokenizer, compiler)


@pytest.mark.parametrize("groups", [(FULL,), deepseek_v4_groups()])
@pytest.mark.parametrize(
    "traits", [BackendTraits(), BackendTraits(mixed_steps=False, padded_rows=(8, 32), samples_on_device=True)]
)
def test_tokens_and_tables_of_all_rows_are_planned(groups: tuple[KVCacheGroupSpec, ...], traits: BackendTraits) -> None:
    limits = BackendLimits(max_num_seqs=24, max_num_batched_tokens=64, max_model_len=1000, depth=2, traits=traits)
    buffers = [StepBuffers.in_host_memory(groups, limits) for _ in range(limits.held_dispatches)]
    batch = RowBatch(groups, limits, buffers, 1000)
    tables = [table for each in buffers for table in each.block_tables]
    arrays = [batch.tokens, *(table.blocks for table in batch.tables), *tables]
    assert row_bytes(groups, limits, len(buffers)) == sum(array.nbytes for array in arrays)


def test_many_rows_of_long_sequences_leave_less_for_kv() -> None:
    """256 rows of a million tokens: gigabytes that the plan once left out."""
    model = make_model(deepseek_v4_groups(), max_position_embeddings=1 << 20)
    large = HostFacts(available_bytes=64 * GIB, num_cpus=4)
    few, many = (
        make_resolved(model, large, max_num_seqs=n, max_model_len=1 << 20).memory.workspace_bytes for n in (1, 256)
    )
    assert many - few > 255 * 4 * (1 << 20)
    with pytest.raises(ConfigError, match=r"--kv-memory is 0 B, too little .* give --max-model-len \d+ or less"):
        make_resolved(model, large, max_num_seqs=65536, max_model_len=1 << 20)


def test_longest_length_that_fits_is_the_default() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=1 << 20), kv_memory="10MiB", max_model_len="auto")
    usable = 10 * MIB // FULL.block_bytes - 1
    assert resolved.engine.limits.max_model_len == usable * 16
    assert "the longest that fits the KV memory" in setting(resolved, "max-model-len")[1]


def test_a_length_shorter_than_the_model_s_is_told() -> None:
    """Below a quarter it is refused, unless it was asked for; a warning has both numbers."""
    model, usable = make_model(max_position_embeddings=1 << 15), (10 * MIB // FULL.block_bytes - 1) * 16
    resolved = make_resolved(model, kv_memory="10MiB")
    (warning,) = resolved.warnings
    assert f"of the model's 32768 tokens only {usable} fit the KV memory of 10 MiB" in warning
    assert make_resolved(model, kv_memory="10MiB", max_model_len="auto").warnings == ()
    assert make_resolved(model, kv_memory="10MiB", max_model_len=usable).warnings == ()
    assert make_resolved(make_model(), kv_memory="10MiB").warnings == ()
    large = make_model(max_position_embeddings=1 << 20)
    with pytest.raises(ConfigError, match=f"only {usable} fit .* give --max-model-len auto or"):
        make_resolved(large, kv_memory="10MiB")
    assert make_resolved(large, kv_memory="10MiB", max_model_len=usable).warnings == ()


def test_a_share_of_the_memory_holds_weights_and_workspace_too() -> None:
    model = make_model(weight_bytes=2 * GIB, max_position_embeddings=1 << 20)
    plans = {share: make_resolved(model, gpu_memory_utilization=share).memory for share in (0.5, 0.9)}
    for share, plan in plans.items():
        assert 0.98 * share < plan.total_bytes / plan.available_bytes <= share
    given = make_resolved(model, gpu_memory_utilization=0.5, kv_memory="9GiB")
    assert given.memory.kv_bytes > 8 * GIB
    with pytest.raises(ConfigError, match=r"fit|too little"):
        make_resolved(model, gpu_memory_utilization=0.1)


def test_without_chunks_a_step_holds_a_whole_prompt() -> None:
    resolved = make_resolved(chunked_prefill=False)
    assert resolved.engine.limits.max_num_batched_tokens == resolved.engine.limits.max_model_len == 4096
    assert "chunked prefill is off" in setting(resolved, "max-num-batched-tokens")[1]


def test_without_chunks_a_given_budget_limits_the_length() -> None:
    resolved = make_resolved(chunked_prefill=False, max_num_batched_tokens=600)
    assert (resolved.engine.limits.max_num_batched_tokens, resolved.engine.limits.max_model_len) == (600, 600)


def test_null_backend_needs_no_memory() -> None:
    tiny = HostFacts(available_bytes=MIB, num_cpus=1)
    resolved = make_resolved(make_model(weight_bytes=10 * GIB), tiny, backend="null", kv_memory="2GiB")
    assert resolved.memory.weight_bytes == resolved.memory.workspace_bytes == 0


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
    "kv_host_memory": st.sampled_from(["0", "1MiB", "0.25"]),
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
    require_blocks(engine, engine.cache.num_blocks)
    assert engine.worker.backend == "null" or memory.total_bytes <= memory.available_bytes
    assert 1 <= engine.limits.max_model_len <= longest
    assert (
        engine.scheduler.enable_chunked_prefill or engine.limits.max_num_batched_tokens >= engine.limits.max_model_len
    )
    step_tokens = min(engine.limits.max_num_batched_tokens, engine.limits.max_model_len) * engine.limits.depth
    first = max_live_blocks(engine.cache.groups, engine.limits.max_model_len, step_tokens)
    for group, blocks, live in zip(engine.cache.groups, engine.cache.num_blocks, first, strict=True):
        for_transfers = ceil_div(live, TRANSFERRED_PART) * bool(engine.cache.tiers)
        most = live * engine.limits.max_num_seqs + for_transfers
        assert live + for_transfers <= blocks - 1 and (blocks - 1 <= most or not group.keeps_history)
        assert blocks * group.block_size <= 2**31


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_largest_is_a_bisection(threshold: int, high: int) -> None:
    assert largest(lambda n: n <= threshold, high) == min(threshold, high)


@given(st.integers(1, 1 << 50))
def test_size_option_rounds_the_way_it_is_asked_to(num_bytes: int) -> None:
    assert parse_size(size_option(num_bytes)) <= num_bytes <= parse_size(size_option(num_bytes, up=True))
