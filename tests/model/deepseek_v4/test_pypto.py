"""The contract of pypto-lib's DeepSeek V4 Flash programs: arguments, tables and slots of random plans, pools, MTP."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.backend.base import StepInputs
from pypto_serving.model.contract import Argument, bind, of_role
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.pypto.arguments import held_as, stages
from pypto_serving.model.deepseek_v4.pypto.pools import POOLS, TABLE_WIDTHS, block_sizes, npu_groups, pages
from pypto_serving.model.deepseek_v4.pypto.steps import (
    LONGEST,
    FlashSteps,
    Row,
    accepted,
    decode_logits,
    prefill_logits,
    rounds,
    state_of,
)
from pypto_serving.model.null_models import FLASH
from pypto_serving.types.kv import CompressedSpec
from pypto_serving.types.step import BackendTraits
from tests.deepseek_v4 import TINY
from tests.model.recorded import Recorded
from tests.simulation import Simulation, null_config

DOCUMENTED = Path(__file__).with_name("flash_arguments.txt")
"""Every argument of the four programs: stage, name, direction, dtype and shape, of eight ranks."""
RANKS = 2
DTYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
GROUPS = {"hca_cmp": "cmp", "csa_cmp": "cmp"}
TOKENS = {"ori": 128, "hca_cmp": 128, "csa_cmp": 128, "idx": 128, "hca_state": 8, "csa_state": 4, "csa_inner_state": 4}
RATIOS = {"hca_cmp": 128, "csa_cmp": 4, "idx": 4}
SLOTS = {pool: f"{'csa_idx' if pool == 'idx' else pool}_slot_mapping" for pool in TOKENS}


def table_name(pool: str, stage: str) -> str:
    if pool == "ori":
        return "block_table" if stage == "decode" else "ori_block_table"
    return f"{pool.replace('_state', '_compress_state')}_block_table"


@pytest.fixture(scope="module")
def flash() -> DeepseekV4Config:
    return DeepseekV4Config.from_json(FLASH, "config.json")


@pytest.fixture(scope="module")
def tiny() -> DeepseekV4Config:
    return DeepseekV4Config.from_json(TINY, "config.json")


def test_arguments_of_flash(flash: DeepseekV4Config) -> None:
    documented = defaultdict(list)
    for line in DOCUMENTED.read_text().splitlines():
        stage, *rest = line.split()
        documented[stage].append(rest)
    found = stages(flash, 8, 8)
    assert found.keys() == documented.keys()
    for stage, arguments in found.items():
        assert [as_documented(each) for each in arguments] == [
            [name, dtype, *shape] for name, _, dtype, *shape in documented[stage]
        ]
        for each, (_, direction, *_) in zip(arguments, documented[stage], strict=True):
            assert each.role in {"in": ("input", "weight"), "out": ("output",), "inout": ("cache", "input")}[direction]


def as_documented(argument: Argument) -> list[str]:
    return [argument.name, argument.dtype, *map(str, argument.shape)]


def test_stages_agree_about_what_they_share(flash: DeepseekV4Config) -> None:
    held: dict[str, tuple[Any, ...]] = {}
    for stage, arguments in stages(flash, 8, 8).items():
        for each in of_role(arguments, "weight", "cache"):
            assert held.setdefault(held_as(stage, each), (each.dtype, each.shape, each.role))[:2] == (
                each.dtype,
                each.shape,
            )
    assert {"kv_cache", "mtp_kv_cache", "mtp_wq_a", "wq_a", "mtp_mtp_norm_w"} <= held.keys()
    assert "mtp_freqs_cos" not in held


def test_groups_of_flash(flash: DeepseekV4Config) -> None:
    """Their default sizes: 128 tokens but for states, keys in int8 with a scale."""
    groups = {group.name: group for group in npu_groups(flash, drafts=True)}
    assert {name: group.block_size for name, group in groups.items()} == {
        "ori": 128,
        "cmp": 128,
        "idx": 128,
        "hca_state": 8,
        "csa_state": 4,
        "csa_inner_state": 4,
    }
    assert [(t.name, t.dtype, t.row_shape, t.ratio) for t in groups["idx"].tensors] == [
        ("key", "int8", (128,), 4),
        ("scale", "float32", (1,), 4),
    ]
    assert [(t.name, t.layers[-1], len(t.layers)) for t in groups["ori"].tensors] == [("kv", 42, 43), ("mtp", 43, 1)]
    assert isinstance(groups["cmp"], CompressedSpec)
    assert dict(TABLE_WIDTHS) == {pool: 16384 // tokens for pool, tokens in TOKENS.items()}


def test_pages_tile_the_pools(flash: DeepseekV4Config) -> None:
    """Every byte of every pool belongs to one block, and a block of ours has as many bytes as its parts."""
    groups, num_blocks = npu_groups(flash, drafts=True), 3
    sizes = block_sizes(flash, groups, [num_blocks] * len(groups))
    arguments = {each.name: each for each in stages(flash, 1, 1)["decode_mtp"]}
    seen = set()
    for group in groups:
        blocks = [pages(group, num_blocks, block) for block in range(num_blocks)]
        for spans in blocks:
            assert sum(end - begin for parts in spans.values() for begin, end in parts) == group.block_bytes
        for name in blocks[0]:
            seen.add(name)
            edges = sorted(span for spans in blocks for span in spans[name])
            assert edges[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(edges))
            assert edges[-1][1] == arguments[name].num_bytes(sizes)
    assert seen == {t for pool in POOLS.values() for t in pool.tensors} | {"mtp_kv_cache"}


def partition(tiny: DeepseekV4Config, seed: int, drafts: int) -> list[StepInputs]:
    """The dispatches of one partition's requests, with chunks, prefix hits and preemption."""
    groups = npu_groups(tiny)
    traits = BackendTraits(mixed_steps=False, samples_on_device=True, max_drafts=drafts)
    config = null_config(
        groups,
        tuple({"ori": 9, "cmp": 11, "idx": 11}.get(group.name, 150) for group in groups),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        vocab_size=tiny.vocab_size,
        traits=traits,
        num_drafts=drafts,
    )
    found: list[StepInputs] = []
    replica, rng = Simulation(config, make_program=lambda config: Recorded(config, found)), random.Random(seed)
    shared = rng.choices(range(300), k=300)
    for _ in range(16):
        prompt = shared[: rng.choice((0, 128, 256))] + rng.choices(range(300), k=rng.randrange(1, 180))
        replica.add(prompt, rng.randrange(1, 40))
    replica.run()
    return [each for each in found if len(each.token_ids)]


def together(parts: list[list[StepInputs]], kind: str) -> list[list[StepInputs | None]]:
    """Dispatches of all partitions; those that are longest run on beside empty ones."""
    return [list(steps) for steps in itertools.zip_longest(*([s for s in part if s.kind == kind] for part in parts))]


def lowered(table: Any, position: int, pool: str, count: int) -> int:
    """Where a program reads or writes a position of a pool, as documented."""
    tokens, ratio = TOKENS[pool], RATIOS.get(pool, 1)
    block = table[position // tokens % count]
    return int(block) * (tokens // ratio) + position % tokens // ratio


@pytest.mark.parametrize("drafts", [0, 1])
def test_decodes_of_random_plans(tiny: DeepseekV4Config, drafts: int) -> None:
    groups = npu_groups(tiny)
    contract, arguments = FlashSteps(tiny, groups, RANKS), of_role(stages(tiny, RANKS, 1)["decode"], "input")
    dispatches = together([partition(tiny, seed, drafts) for seed in range(RANKS)], "decode")
    widths = set()
    for steps in dispatches:
        values = contract.decode(steps)
        require(arguments, values)
        for rank, step in enumerate(steps):
            own = {name: value[rank] for name, value in values.items()}
            rows = 0 if step is None else len(step.context_lens)
            assert own["num_tokens_per_owner"] == 2 * rows
            assert not own["kv_seq_lens"][rows:].any() and not own["input_ids"][2 * rows :].any()
            for pool in TOKENS:
                assert not own[table_name(pool, "decode")][rows:].any(), "padding is in the null block"
            if step is None:
                assert (own["logit_row_indices"] == -1).all()
                continue
            widths |= set(np.diff(step.query_start).tolist())
            check_decode(step, own, groups)
    assert widths == ({1, 2} if drafts else {1})
    assert any(None in steps for steps in dispatches)


def check_decode(step: StepInputs, own: dict[str, Any], groups: Any) -> None:
    wanted, blocks = [], live_blocks(step, groups)
    places = {group.name: i for i, group in enumerate(groups)}
    for row in range(len(step.context_lens)):
        begin, end = step.query_start[row : row + 2].tolist()
        assert own["kv_seq_lens"][row] == step.positions[end - 1] + 1
        for j in range(2):
            place, position = 2 * row + j, int(step.positions[begin]) + j
            assert own["position_ids"][place] == position
            assert own["input_ids"][place] == step.token_ids[min(begin + j, end - 1)]
            if begin + j < end and begin + j in step.logits_rows:
                wanted.append(place)
            for column, pool in enumerate(TOKENS):
                count = own["block_counts"][row, column]
                slot = lowered(own[table_name(pool, "decode")][row], position, pool, count)
                rows_per_block = TOKENS[pool] // RATIOS.get(pool, 1)
                if begin + j < end:
                    source = step.slot_mapping[places[GROUPS.get(pool, pool)]][begin + j]
                    assert slot == source // RATIOS.get(pool, 1) and slot >= rows_per_block
                else:
                    live = blocks[GROUPS.get(pool, pool)].items()
                    others = {block for other, held in live if other != row for block in held}
                    assert slot // rows_per_block not in others - {0}, "a token that fills up writes to another row"
        first = max(0, int(step.positions[begin]) - 127)
        for position in range(first, int(step.positions[end - 1]) + 1):
            block = step.block_tables[places["ori"]][row, position // 128]
            assert lowered(own["block_table"][row], position, "ori", 128) == block * 128 + position % 128
    assert own["logit_row_indices"].tolist() == [t if t in wanted else -1 for t in range(8)]
    logits = np.arange(8, dtype=np.float32)[:, None]
    assert decode_logits(step, logits)[:, 0].tolist() == wanted


def live_blocks(step: StepInputs, groups: Any) -> dict[str, dict[int, set[int]]]:
    """The blocks of each row that it still reads, by KV group; a table has those given back, too."""
    return {
        group.name: {
            row: set(table[row, group.first_needed(n - 1) // group.block_size : -(-n // group.block_size)].tolist())
            for row, n in enumerate(step.context_lens.tolist())
        }
        for group, table in zip(groups, step.block_tables, strict=True)
    }


def test_prefills_of_random_plans(tiny: DeepseekV4Config) -> None:
    groups = npu_groups(tiny)
    places = {group.name: i for i, group in enumerate(groups)}
    contract, arguments = FlashSteps(tiny, groups, RANKS), of_role(stages(tiny, RANKS, 1)["prefill"], "input")
    embedding = np.random.default_rng(0).integers(0, 1 << 14, (tiny.vocab_size, tiny.hidden_size), np.uint16)
    starts, sampled, num_rows = set(), 0, 0
    for steps in together([partition(tiny, seed, 0) for seed in range(RANKS)], "prefill"):
        for row, partitions in enumerate(rounds(steps)):
            values = contract.prefill(partitions, embedding)
            sizes = require(arguments, values)
            assert sizes["T"] % 128 == 0
            for rank, (found, step) in enumerate(zip(partitions, steps, strict=True)):
                assert (found is None) == (step is None or row >= len(step.context_lens))
                own = {name: value[rank] for name, value in values.items()}
                check_prefill(found, own, places, embedding)
                if found is not None and step is not None:
                    begin, end = step.query_start[row : row + 2].tolist()
                    assert found.token_ids.tolist() == step.token_ids[begin:end].tolist()
                    starts.add(int(found.positions[0]))
                    sampled += len(found.logits_rows)
                    num_rows += 1
    assert {0, 128, 256} <= starts
    assert 0 < sampled < num_rows


def check_prefill(found: Row | None, own: dict[str, Any], places: dict[str, int], embedding: Any) -> None:
    count = 0 if found is None else len(found.token_ids)
    assert own["num_tokens_per_owner"] == count
    for pool in TOKENS:
        assert (own[SLOTS[pool]][count:] == -1).all()
    if found is None:
        assert (own["logit_row_indices"] == -1).all()
        return
    samples = len(found.logits_rows) > 0
    assert own["logit_row_indices"].tolist() == [count - 1 if samples else -1, *[-1] * 7]
    assert len(prefill_logits(found, np.zeros((8, 4), np.float32))) == samples
    exact = (embedding[found.token_ids].astype(np.uint32) << 16).view(np.float32)
    assert (own["x_hc"][:count] == exact[:, None]).all() and own["x_hc"].shape[1] == 4
    assert own["input_ids"][:count].tolist() == found.token_ids.tolist()
    for j, position in enumerate(found.positions.tolist()):
        assert own["position_ids"][j] == position
        for pool in TOKENS:
            ratio = RATIOS.get(pool, 1)
            slot = lowered(own[table_name(pool, "prefill")], position, pool, 16384 // TOKENS[pool])
            assert own[SLOTS[pool]][j] == (slot if (position + 1) % ratio == 0 else -1)
            assert slot // (TOKENS[pool] // ratio) > 0, "a token is in the null block"
            source = found.slot_mapping[places[GROUPS.get(pool, pool)]][j]
            assert slot == source // ratio


def require(arguments: list[Argument], values: dict[str, Any]) -> dict[str, int]:
    """Check names, shapes and dtypes; return the sizes that a dispatch chose."""
    for each in arguments:
        assert values[each.name].dtype == DTYPES[each.dtype], each.name
    return bind(arguments, {name: value.shape for name, value in values.items()})


def test_refused_steps(tiny: DeepseekV4Config) -> None:
    contract = FlashSteps(tiny, npu_groups(tiny), RANKS)
    step = next(each for each in partition(tiny, 0, 0) if each.kind == "prefill" and len(each.context_lens) > 1)
    with pytest.raises(ValueError, match="2 partitions, not 1"):
        contract.decode([None])
    with pytest.raises(ValueError, match="4 rows of 2 tokens at most"):
        contract.decode([step, None])
    with pytest.raises(ValueError, match="one row at a time, not"):
        contract.prefill([None, step], np.zeros((tiny.vocab_size, tiny.hidden_size), np.uint16))


def test_the_longest_sequence_has_room_behind_it(tiny: DeepseekV4Config) -> None:
    """A decode at the last position is filled up with the next, which the tables have too."""
    contract, groups = FlashSteps(tiny, npu_groups(tiny), 1), npu_groups(tiny)
    tables = tuple(np.ones((1, -(-LONGEST // group.block_size)), np.int32) for group in groups)
    last = np.array([LONGEST - 1], np.int32)
    row = Row(last, last, np.array([0, 1], np.int32), last + 1, np.zeros(1, np.int32), (last,) * len(groups), tables)
    values = contract.decode([row])
    assert values["position_ids"][0, :2].tolist() == [16382, 16383]
    assert all(values[table_name(pool, "decode")].shape[-1] == 16384 // tokens for pool, tokens in TOKENS.items())


def test_mtp(tiny: DeepseekV4Config) -> None:
    """Inputs of a decode with MTP, the tokens that its rows keep, and the state of a new slot."""
    contract, arguments = (
        FlashSteps(tiny, npu_groups(tiny), RANKS),
        of_role(stages(tiny, RANKS, 1)["decode_mtp"], "input"),
    )
    steps: Any = [None, next(each for each in partition(tiny, 1, 1) if each.kind == "decode")]
    slots = np.array([[-1] * 4, [2, 0, 3, 1]], np.int32)
    values = contract.decode_mtp(steps, slots, slots + 7)
    require(arguments, values)
    assert values["mtp_logit_row_indices"].tolist() == [[1, 3, 5, 7, -1, -1, -1, -1]] * RANKS
    assert values["mtp_num_tokens"] == 8
    sampled = np.arange(64, dtype=np.int32).reshape(8, 8)
    counts, tokens = accepted(3, sampled, np.array([1, 2, 1, 2], np.int32))
    assert counts.tolist() == [1, 2, 1]
    assert tokens.tolist() == [0, 16, 24, 32]
    found, meta = state_of(num_tokens=10, last=5, draft=6, generation=3)
    assert (found.tolist(), meta.tolist()) == ([5, 6], [1, 3, 8, 0])
    assert (found.dtype, meta.dtype) == (np.int64, np.int32)
