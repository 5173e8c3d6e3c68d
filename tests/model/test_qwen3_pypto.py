"""The contracts of pypto-lib's Qwen3 programs: names, order, shapes and dtypes of arguments, their values, weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pypto_serving.backend.base import StepInputs
from pypto_serving.model.checkpoint import StoredTensors
from pypto_serving.model.contract import Argument, bind, of_role, same_arguments
from pypto_serving.model.families import qwen3
from pypto_serving.model.qwen3.pypto import Qwen3Contract
from pypto_serving.model.registry import read_config
from pypto_serving.types.step import BackendTraits
from tests.checkpoints import make_checkpoint
from tests.model.configs import QWEN3_14B
from tests.model.recorded import Recorded
from tests.simulation import Simulation, in_pages, null_config

L, H, KVH, D, INNER, V, MAX = 40, 5120, 1024, 128, 17408, 152064, 4096
WEIGHTS = {
    "input_rms_weight": ("float32", (L, H)),
    "wq": ("bfloat16", (L * H, H)),
    "wk": ("bfloat16", (L * H, KVH)),
    "wv": ("bfloat16", (L * H, KVH)),
    "q_norm_weight": ("float32", (L, D)),
    "k_norm_weight": ("float32", (L, D)),
    "rope_cos": ("float32", (MAX, D)),
    "rope_sin": ("float32", (MAX, D)),
    "k_cache": ("bfloat16", ("ROWS", D)),
    "v_cache": ("bfloat16", ("ROWS", D)),
    "wo": ("bfloat16", (L * H, H)),
    "post_rms_weight": ("float32", (L, H)),
    "w_gate": ("bfloat16", (L * H, INNER)),
    "w_up": ("bfloat16", (L * H, INNER)),
    "w_down": ("bfloat16", (L * INNER, H)),
    "final_norm_weight": ("float32", (1, H)),
    "lm_head_weight": ("bfloat16", (V, H)),
    "embed_weight": ("bfloat16", (V, H)),
}
PREFILL = {
    "hidden_states": ("bfloat16", ("T", H)),
    "input_ids": ("int32", ("T",)),
    "seq_lens": ("int32", ("B",)),
    "chunk_lens": ("int32", ("B",)),
    "chunk_offsets": ("int32", ("B",)),
    "block_table": ("int32", ("BM",)),
    "slot_mapping": ("int32", ("T",)),
    "out": ("float32", ("B", V)),
}
DECODE = {
    "hidden_states": ("bfloat16", ("B", H)),
    "seq_lens": ("int32", ("B",)),
    "block_table": ("int32", ("BM",)),
    "slot_mapping": ("int32", ("B",)),
    "out": ("float32", ("B", V)),
    "sampled_ids_in": ("int32", ("B", 8)),
    "sampled_ids": ("int32", ("B", 8)),
    "next_hidden": ("bfloat16", ("B", H)),
}
PREFILL_ORDER = (
    "seq_lens chunk_lens chunk_offsets input_rms_weight wq wk wv q_norm_weight k_norm_weight rope_cos rope_sin "
    "block_table slot_mapping k_cache v_cache wo"
)
MLP, HEAD = "w_gate w_up w_down", "final_norm_weight lm_head_weight"
DECODE_ORDER = (
    "input_rms_weight wq wk wv q_norm_weight k_norm_weight seq_lens block_table slot_mapping rope_cos rope_sin k_cache "
    f"v_cache wo {MLP} post_rms_weight {HEAD} out"
)
ORDERS = {
    ("2026-06", "prefill"): f"hidden_states {PREFILL_ORDER} post_rms_weight {MLP} {HEAD} out",
    ("2026-06", "decode"): f"hidden_states {DECODE_ORDER}",
    ("2026-08", "prefill"): f"input_ids {PREFILL_ORDER} {MLP} post_rms_weight {HEAD} embed_weight out",
    ("2026-08", "decode"): f"{DECODE_ORDER} embed_weight sampled_ids_in sampled_ids next_hidden",
}
COUNTS = {("2026-06", "prefill"): 24, ("2026-06", "decode"): 22, ("2026-08", "prefill"): 25, ("2026-08", "decode"): 25}


@pytest.mark.parametrize(("revision", "stage"), ORDERS)
def test_arguments_of_qwen3_14b(revision: Any, stage: Any) -> None:
    """Names, order, dtypes and shapes, as pypto-lib documents them."""
    contract = Qwen3Contract(qwen3.parse(QWEN3_14B, "config.json"), revision, 4096, 512)
    arguments = contract.stages[stage]
    assert [each.name for each in arguments] == ORDERS[revision, stage].split()
    assert len(arguments) == COUNTS[revision, stage]
    tables = WEIGHTS | (PREFILL if stage == "prefill" else DECODE)
    assert {each.name: (each.dtype, each.shape) for each in arguments} == {e.name: tables[e.name] for e in arguments}
    outputs = {"prefill": ["out"], "decode": ["out", "sampled_ids", "next_hidden"][: 3 if revision == "2026-08" else 1]}
    assert [each.name for each in of_role(arguments, "output")] == outputs[stage]
    assert [each.name for each in of_role(arguments, "cache")] == ["k_cache", "v_cache"]


def test_bytes_of_qwen3_14b() -> None:
    """The weights take 29.5 GB."""
    contract = Qwen3Contract(qwen3.parse(QWEN3_14B, "config.json"), "2026-08", 4096, 512)
    weights = of_role(same_arguments(contract.stages).values(), "weight")
    assert round(sum(each.num_bytes({}) for each in weights) / 1e9, 1) == 29.5


def small(path: Path, revision: Any, max_model_len: int = 512) -> Qwen3Contract:
    model = read_config(path).model
    return Qwen3Contract(model, revision, max_model_len, 96)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16", tie_word_embeddings=False)


def dispatches(contract: Qwen3Contract, seed: int) -> list[StepInputs]:
    """The dispatches of a replica with chunks, prefix hits and preemption, whose traits are those of the backend."""
    group = in_pages(null_config().cache.groups, 128)
    traits = BackendTraits(mixed_steps=False, padded_rows=(16,), page_tokens=128, prompt_logprobs=False)
    config = null_config(
        group, 14, max_model_len=512, max_num_batched_tokens=96, traits=traits, vocab_size=contract.model.vocab_size
    )
    found: list[StepInputs] = []
    replica, rng = Simulation(config, make_program=lambda config: Recorded(config, found)), random.Random(seed)
    shared = rng.choices(range(300), k=200)
    for _ in range(24):
        prompt = shared[: rng.choice((0, 128, 200))] + rng.choices(range(300), k=rng.randrange(1, 180))
        replica.add(prompt, rng.randrange(1, 60))
    replica.run()
    assert replica.counters.num_preemptions
    return [each for each in found if len(each.token_ids)]


@pytest.mark.parametrize("revision", ["2026-06", "2026-08"])
def test_random_plans(checkpoint: Path, revision: Any) -> None:
    contract = small(checkpoint, revision)
    embedding = contract.embedding(StoredTensors(checkpoint, lambda *_: None))
    steps = dispatches(contract, seed=5)
    assert {each.kind for each in steps} == {"prefill", "decode"}
    starts = set()
    for step in steps:
        stage: Any = step.kind
        values = contract.inputs(stage, step, embedding)
        inputs = of_role(contract.stages[stage], "input")
        sizes = bind(inputs, {name: value.shape for name, value in values.items()})
        assert all(sizes[name] <= contract.most[name] for name in sizes)
        for each in inputs:
            assert values[each.name].dtype == {"int32": np.int32, "bfloat16": np.uint16}[each.dtype]
        starts |= check(contract, stage, step, values, embedding)
    assert {0, 128} <= starts, "no chunk began at a prefix hit, or none at the beginning"


def check(contract: Qwen3Contract, stage: str, step: StepInputs, values: Any, embedding: Any) -> set[int]:
    """Compare the values with what pypto-lib's documents say of them, token by token; return where chunks began."""
    rows = len(step.context_lens)
    width = len(values["block_table"]) // rows
    assert len(values["block_table"]) == rows * width and width == 4
    assert rows == 16 if stage == "decode" else rows <= 16
    if stage == "decode":
        counts, offsets = [1] * rows, list(range(rows))
    else:
        counts, offsets = values["chunk_lens"].tolist(), values["chunk_offsets"].tolist()
        assert offsets == [sum(counts[:row]) for row in range(rows)] and sum(counts) == len(step.token_ids)
    for row, (count, offset) in enumerate(zip(counts, offsets, strict=True)):
        for j in range(count):
            token, position = offset + j, values["seq_lens"][row] - count + j
            assert position == step.positions[token]
            page = values["block_table"][row * width + position // 128]
            assert values["slot_mapping"][token] == page * 128 + position % 128
            assert (page == 0) == (row >= step.num_rows), "the null block has padding, and nothing else"
            if embedding is not None:
                assert (values["hidden_states"][token] == embedding[step.token_ids[token]]).all()
            elif stage == "prefill":
                assert values["input_ids"][token] == step.token_ids[token]
            else:
                assert values["sampled_ids_in"][token].tolist() == [step.token_ids[token], *[0] * 7]
    return {int(step.positions[offset]) for offset in offsets} if stage == "prefill" else set()


@pytest.mark.parametrize("revision", ["2026-06", "2026-08"])
def test_weights(checkpoint: Path, revision: Any) -> None:
    """Each tensor of a shrunken checkpoint, transformed by hand."""
    contract, model = small(checkpoint, revision), read_config(checkpoint).model
    stored = {name: value.view(np.uint16) for name, value in load_file_bits(checkpoint).items()}
    wanted = expected_weights(stored, model, revision)
    tensors = StoredTensors(checkpoint, lambda *_: None)
    arguments = {each.name: each for each in of_role(same_arguments(contract.stages).values(), "weight")}
    found = {name: np.concatenate(list(pieces)) for name, pieces in contract.weights(tensors)}
    assert found.keys() == arguments.keys() == wanted.keys()
    for name, value in found.items():
        assert value.shape == arguments[name].shape, name
        assert value.dtype == {"float32": np.float32, "bfloat16": np.uint16}[arguments[name].dtype]
        np.testing.assert_array_equal(value, wanted[name], name)


def test_devices_have_parts_of_what_one_has(checkpoint: Path) -> None:
    """Put together, the parts of two devices are one's weights; each has all norms, tables and embeddings."""
    model = read_config(checkpoint).model
    one, two = (Qwen3Contract(model, "2026-08", 512, 96, devices) for devices in (1, 2))
    whole, parts = (
        {
            name: np.concatenate(list(pieces))
            for name, pieces in each.weights(StoredTensors(checkpoint, lambda *_: None))
        }
        for each in (one, two)
    )
    arguments = same_arguments(two.stages)
    padding, layers = two.vocabulary - one.vocabulary, model.num_layers
    for name, value in whole.items():
        first, second = (parts.pop(f"{name}_{device}") for device in range(2))
        assert first.shape == second.shape == arguments[f"{name}_0"].shape, name
        assert [arguments[f"{name}_{device}"].device for device in range(2)] == [0, 1]
        if name in ("wq", "wk", "wv", "w_gate", "w_up"):
            np.testing.assert_array_equal(np.concatenate([first, second], axis=1), value, name)
        elif name in ("wo", "w_down"):
            both = np.concatenate([each.reshape(layers, -1, model.hidden_size) for each in (first, second)], axis=1)
            np.testing.assert_array_equal(both.reshape(value.shape), value, name)
        elif name == "lm_head_weight":
            wanted = np.concatenate([value, np.broadcast_to(value[:1], (padding, model.hidden_size))])
            np.testing.assert_array_equal(np.concatenate([first, second]), wanted)
        else:
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(first[: len(value)], value, name)
    assert not parts
    assert two.logits == ("out_0", "out_1") and one.layout != two.layout


def load_file_bits(path: Path) -> dict[str, Any]:
    """The tensors of a checkpoint as raw bits of bfloat16."""
    return {name: value.view(torch.int16).numpy() for name, value in load_file(path / "model.safetensors").items()}


def expected_weights(stored: Any, model: Any, revision: str) -> dict[str, Any]:
    layers = range(model.num_layers)
    names = {
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "w_gate": "mlp.gate_proj",
        "w_up": "mlp.up_proj",
        "w_down": "mlp.down_proj",
    }
    norms = {
        "input_rms_weight": "input_layernorm",
        "q_norm_weight": "self_attn.q_norm",
        "k_norm_weight": "self_attn.k_norm",
        "post_rms_weight": "post_attention_layernorm",
    }
    wanted = {
        ours: np.concatenate([stored[f"model.layers.{i}.{theirs}.weight"].T for i in layers])
        for ours, theirs in names.items()
    }
    wanted |= {
        ours: np.stack([floats(stored[f"model.layers.{i}.{theirs}.weight"]) for i in layers])
        for ours, theirs in norms.items()
    }
    wanted["final_norm_weight"] = floats(stored["model.norm.weight"])[None]
    head, table = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    padding = 512 - len(head)
    wanted["lm_head_weight"] = np.concatenate([head, *[head[:1]] * padding])
    if revision == "2026-08":
        wanted["embed_weight"] = np.concatenate([table, np.zeros((padding, table.shape[1]), np.uint16)])
    frequencies = 1e6 ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
    angles = np.arange(4096)[:, None] * np.tile(frequencies, 2)
    cos, sin = model.attention.rope.tables(4096)
    wanted["rope_cos"], wanted["rope_sin"] = np.tile(cos, 2), np.tile(sin, 2)
    np.testing.assert_allclose(wanted["rope_cos"], np.cos(angles), atol=2e-3)
    np.testing.assert_allclose(wanted["rope_sin"], np.sin(angles), atol=2e-3)
    return wanted


def floats(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("revision", ["2026-06", "2026-08"])
def test_bytes_of_pages(checkpoint: Path, revision: Any) -> None:
    """A page has the bytes of the rows where programs keep its slots, in all layers."""
    contract, pages = small(checkpoint, revision), 3
    model, seen = contract.model, {}
    heads = model.num_kv_heads
    for layer in range(model.num_layers):
        for slot in range(pages * 128):
            for head in range(heads):
                page, offset = divmod(slot, 128)
                inner = (page * 128 + offset) * heads + head
                if revision == "2026-06":
                    inner = (page * heads + head) * 128 + offset
                seen[layer * pages * heads * 128 + inner] = page
    row_bytes = 2 * model.head_dim
    for page in range(pages):
        for name, spans in contract.pages(pages, page).items():
            rows = [row for begin, end in spans for row in range(begin // row_bytes, end // row_bytes)]
            assert name in ("k_cache", "v_cache")
            assert len(rows) == model.num_layers * heads * 128 and {seen[row] for row in rows} == {page}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"attention_bias": True}, "their projections have no bias"),
        ({"rms_norm_eps": 1e-5}, "their norms have the epsilon 1e-06, not 1e-05"),
        ({"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 64}, "they have no experts"),
    ],
)
def test_what_the_programs_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    assert Qwen3Contract.obstacle(qwen3.parse(QWEN3_14B | changes, "config.json")) == reason


ARGUMENTS = (Argument("x", "int32", ("T",), "input"), Argument("w", "float32", (4, 2)), Argument("y", "int32", ("T",)))


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"x": (3,), "w": (4, 2), "y": (4,)}, "argument y has the shape (4,), but must have ('T',) with T = 3"),
        ({"x": (3,), "w": (2, 4), "y": (3,)}, "argument w has the shape (2, 4), but must have (4, 2)"),
        ({"x": (3, 1), "w": (4, 2), "y": (3,)}, "argument x has the shape (3, 1), but must have ('T',)"),
        ({"x": (3,), "w": (4, 2)}, "argument y is missing"),
        ({"x": (3,), "w": (4, 2), "y": (3,), "z": ()}, "there is no argument z"),
    ],
)
def test_wrong_shapes_are_refused(shapes: Any, problem: str) -> None:
    assert bind(ARGUMENTS, {"x": (3,), "w": (4, 2), "y": (3,)}) == {"T": 3}
    with pytest.raises(ValueError) as error:
        bind(ARGUMENTS, shapes)
    assert str(error.value) == problem
