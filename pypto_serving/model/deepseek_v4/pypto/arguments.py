"""The arguments of pypto-lib's DeepSeek V4 Flash programs: order, dtypes, shapes and roles. Torch-free.

Every shape begins with the number of ranks, and rank r has slice r; counts of all ranks, and scalars, are the
exception. Sizes with a name: T tokens of a prefill, VOCAB rows of the embedding, and the blocks of a pool over all of
its layers, as in ORI_BLOCKS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pypto_serving.model.contract import Argument, Role
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import draft_tensors, head_mix_tensors, layer_tensors
from pypto_serving.model.deepseek_v4.pypto.pools import MAX_TOKENS, POOLS, TABLE_WIDTHS
from pypto_serving.model.deepseek_v4.pypto.weights import CSA, DRAFT, EVERY_LAYER, HCA, HEAD_MIX, Made
from pypto_serving.model.inventory import Tensor

REQUESTS, STEP_TOKENS = 4, 2
"""Requests of a rank in a decode, and tokens of each."""
DECODE_TOKENS = LOGIT_ROWS = REQUESTS * STEP_TOKENS
PREFILL_TILE = 128
"""Tokens that a prefill computes at a time."""
IDS_PAD = 8

FlashStage = Literal["prefill", "decode", "decode_mtp", "prefill_mtp"]
Table = dict[str, tuple[str, tuple[int | str, ...]]]
"""Dtype and shape of one rank, by the name of the argument."""

_DTYPES = {"float": "float32", "bias": "float32", "ids": "int32", "codes": "int8", "codes_transposed": "int8"}
"""Of weights made in one of these ways; all others are bfloat16."""
_ORDER = Path(__file__).with_name("order.json")
"""The arguments of l3_prefill_fwd, l3_decode_fwd and l3_mtp_prefill_fwd, and the last of l3_decode_fwd_mtp."""
_OF_ALL_RANKS = ("num_tokens_per_owner", "mtp_num_tokens", "num_tokens")
_OUTPUTS = {"pre_hc_hidden_out", "hidden_out", "logits", "sampled_ids", "mtp_accepted_counts", "mtp_position_ids"}
_OUTPUTS |= {"mtp_input_ids", "mtp_hidden_out", "mtp_next_pre_hc_hidden", "mtp_logits", "mtp_sampled_ids"}
_STATES = {"mtp_tail_token_ids", "mtp_tail_positions", "mtp_tail_pre_hc_pool", "mtp_state_tokens", "mtp_state_meta"}
"""What MTP keeps on the device between steps."""


def stages(model: DeepseekV4Config, ranks: int, tensor: int) -> dict[FlashStage, tuple[Argument, ...]]:
    """Return the arguments of all programs; each group of `tensor` ranks has the output layer once."""
    order: dict[FlashStage, list[str]] = json.loads(_ORDER.read_text("utf-8"))
    shared, draft = _weights(model, ranks, tensor) | _pools(model), _draft(model, ranks)
    return {
        "prefill": _stage(order["prefill"], shared, _prefill(model, ranks), ranks),
        "decode": _stage(order["decode"], shared, _decode(model, ranks), ranks),
        "decode_mtp": _stage(order["decode"] + order["decode_mtp"], shared | draft, _decode_mtp(model, ranks), ranks),
        "prefill_mtp": _stage(
            order["prefill_mtp"],
            shared | {name.removeprefix("mtp_"): value for name, value in draft.items()},
            _prefill_mtp(model),
            ranks,
        ),
    }


def held_as(stage: FlashStage, argument: Argument) -> str:
    """Return the name of a weight or pool on the device: in prefill_mtp those of the draft layer lack a prefix."""
    is_shared = argument.name in ("freqs_cos", "freqs_sin", "lm_head_weight")
    prefix = "mtp_" if stage == "prefill_mtp" and argument.role in ("weight", "cache") and not is_shared else ""
    return prefix + argument.name


def _stage(order: list[str], shared: Table, own: Table, ranks: int) -> tuple[Argument, ...]:
    """Put arguments in order, each with the axis of ranks in front."""
    found = []
    for name in order:
        dtype, shape = own[name] if name in own else shared[name]
        in_front = () if name in _OF_ALL_RANKS else (ranks,)
        found.append(Argument(name, dtype, (*in_front, *shape), _role(name, name in own)))
    return tuple(found)


def _role(name: str, is_own: bool) -> Role:
    if name in _OUTPUTS:
        return "output"
    if name in _STATES or name == "mtp_kv_cache" or any(name in pool.tensors for pool in POOLS.values()):
        return "cache"
    return "input" if is_own else "weight"


def _pools(model: DeepseekV4Config) -> Table:
    """Return the pools, whose layers lie one after the other in the first dimension."""
    assert model.indexer is not None
    dim, key, page = model.head_dim, model.indexer.head_dim, POOLS["ori"].tokens
    return {
        "kv_cache": ("bfloat16", ("ORI_BLOCKS", page, 1, dim)),
        "hca_cmp_kv": ("bfloat16", ("HCA_CMP_BLOCKS", page // model.hca_ratio, 1, dim)),
        "csa_cmp_kv": ("bfloat16", ("CSA_CMP_BLOCKS", page // model.csa_ratio, 1, dim)),
        "idx_kv_cache": ("int8", ("IDX_BLOCKS", page // model.csa_ratio, 1, key)),
        "idx_kv_scale": ("float32", ("IDX_BLOCKS", page // model.csa_ratio, 1, 1)),
        "hca_compress_state": ("float32", ("HCA_STATE_BLOCKS", POOLS["hca_state"].tokens, 2 * dim)),
        "csa_compress_state": ("float32", ("CSA_STATE_BLOCKS", POOLS["csa_state"].tokens, 4 * dim)),
        "csa_inner_compress_state": ("float32", ("CSA_INNER_STATE_BLOCKS", POOLS["csa_inner_state"].tokens, 4 * key)),
    }


def _decode(model: DeepseekV4Config, ranks: int) -> Table:
    hidden, streams, b, t = model.hidden_size, model.hyper.streams, REQUESTS, DECODE_TOKENS
    return {
        **{pool.decode_table: ("int32", (b, TABLE_WIDTHS[name])) for name, pool in POOLS.items()},
        "block_counts": ("int32", (b, len(POOLS))),
        "position_ids": ("int32", (t,)),
        "kv_seq_lens": ("int32", (b,)),
        "input_ids": ("int64", (t,)),
        "num_tokens_per_owner": ("int32", (ranks,)),
        "logit_row_indices": ("int32", (LOGIT_ROWS,)),
        "pre_hc_hidden_out": ("float32", (t, streams, hidden)),
        "hidden_out": ("bfloat16", (t, hidden)),
        "logits": ("float32", (LOGIT_ROWS, model.vocab_size)),
        "sampled_ids": ("int32", (LOGIT_ROWS, IDS_PAD)),
    }


def _prefill(model: DeepseekV4Config, ranks: int) -> Table:
    hidden, streams = model.hidden_size, model.hyper.streams
    return {
        **{pool.prefill_table: ("int32", (TABLE_WIDTHS[name],)) for name, pool in POOLS.items()},
        **{pool.slot_mapping: ("int64", ("T",)) for pool in POOLS.values()},
        "x_hc": ("float32", ("T", streams, hidden)),
        "position_ids": ("int32", ("T",)),
        "input_ids": ("int64", ("T",)),
        "num_tokens_per_owner": ("int32", (ranks,)),
        "logit_row_indices": ("int32", (LOGIT_ROWS,)),
        "pre_hc_hidden_out": ("float32", (PREFILL_TILE, streams, hidden)),
        "hidden_out": ("bfloat16", ("T", hidden)),
        "logits": ("float32", (LOGIT_ROWS, model.vocab_size)),
    }


def _decode_mtp(model: DeepseekV4Config, ranks: int) -> Table:
    """Return what a decode with MTP reads and writes beside weights: also the state of its requests."""
    hidden, streams, b, t = model.hidden_size, model.hyper.streams, REQUESTS, DECODE_TOKENS
    return {
        **_decode(model, ranks),
        **{f"mtp_{name}": ("int32", (b,)) for name in ("tail_positions", "accepted_counts", "tail_slot_ids")},
        "mtp_state_generations": ("int32", (b,)),
        "mtp_tail_token_ids": ("int64", (b,)),
        "mtp_tail_pre_hc_pool": ("float32", (b, streams, hidden)),
        "mtp_state_tokens": ("int64", (b, 2)),
        "mtp_state_meta": ("int32", (b, 4)),
        "mtp_position_ids": ("int32", (t,)),
        "mtp_input_ids": ("int64", (t,)),
        "mtp_hidden_out": ("bfloat16", (t, hidden)),
        "mtp_next_pre_hc_hidden": ("float32", (t, streams, hidden)),
        "mtp_logits": ("float32", (LOGIT_ROWS, model.vocab_size)),
        "mtp_sampled_ids": ("int32", (LOGIT_ROWS, IDS_PAD)),
        "mtp_logit_row_indices": ("int32", (LOGIT_ROWS,)),
        "mtp_num_tokens": ("int32", ()),
    }


def _prefill_mtp(model: DeepseekV4Config) -> Table:
    """Return what one tile of the draft layer's prefill reads and writes beside weights."""
    hidden, streams, t = model.hidden_size, model.hyper.streams, PREFILL_TILE
    return {
        "hidden_states": ("bfloat16", (t, hidden)),
        "prev_hidden_states": ("float32", (t, streams, hidden)),
        "ori_block_table": ("int32", (TABLE_WIDTHS["ori"],)),
        "ori_slot_mapping": ("int64", (t,)),
        "position_ids": ("int32", (t,)),
        "input_ids": ("int64", (t,)),
        "hidden_out": ("bfloat16", (t, hidden)),
        "pre_hc_hidden_out": ("float32", (t, streams, hidden)),
        "logits": ("float32", (LOGIT_ROWS, model.vocab_size)),
        "logit_row_indices": ("int32", (LOGIT_ROWS,)),
        "num_tokens": ("int32", ()),
    }


def _draft(model: DeepseekV4Config, ranks: int) -> Table:
    """Return the weights of the draft layer, and its pool."""
    layer = {name.removeprefix("mtp.0."): tensor for name, tensor in draft_tensors(model, range(1)).items()}
    table = {
        **_made(model, EVERY_LAYER | DRAFT, layer, 1),
        **_experts(model, ranks, 1),
        **dict.fromkeys(("e_proj_smooth", "h_proj_smooth"), ("float32", (model.hidden_size,))),
        "kv_cache": ("bfloat16", ("MTP_BLOCKS", POOLS["ori"].tokens, 1, model.head_dim)),
    }
    return {f"mtp_{name}": value for name, value in table.items()}


def _weights(model: DeepseekV4Config, ranks: int, tensor: int) -> Table:
    assert model.indexer is not None
    hidden, key, every, csa = model.hidden_size, model.indexer.head_dim, model.num_layers, len(model.layers_of("csa"))
    return {
        **_made(model, EVERY_LAYER, layer_tensors(model, 0, "swa"), every),
        **_experts(model, ranks, every),
        **_made(model, HCA, layer_tensors(model, 0, "hca"), len(model.layers_of("hca"))),
        **_made(model, CSA, layer_tensors(model, 0, "csa"), csa),
        **_made(model, HEAD_MIX, head_mix_tensors(model), 1),
        "csa_hadamard_idx": ("bfloat16", (csa * key, key)),
        "embed_weight": ("bfloat16", ("VOCAB", hidden)),
        "lm_head_weight": ("bfloat16", (model.vocab_size // tensor, hidden)),
        "final_norm_w": ("bfloat16", (hidden,)),
        **dict.fromkeys(("freqs_cos", "freqs_sin"), ("bfloat16", (2, MAX_TOKENS, model.rope_dim))),
    }


def _made(model: DeepseekV4Config, made: Made, tensors: Mapping[str, Tensor], n: int) -> Table:
    """Return what is made of `n` layers, or of the model, with these tensors."""
    table = Table()
    for argument, (how, name) in made.items():
        shape: tuple[int, ...]
        if how == "bias":
            shape = (model.experts.count,)
        elif how == "ids":
            shape = (model.vocab_size, model.experts.per_token)
        elif name.endswith(".scale"):
            shape = tensors[f"{name.removesuffix('scale')}weight"].shape[:1]
        else:
            shape = tensors[name].shape
        if how.endswith("transposed"):
            shape = shape[::-1]
        elif how == "grouped":
            shape = (model.o_groups, model.o_lora_rank, shape[1])
        table[argument] = (_DTYPES.get(how, "bfloat16"), (n * shape[0], *shape[1:]))
    return table


def _experts(model: DeepseekV4Config, ranks: int, n: int) -> Table:
    """Return a rank's part of the experts of `n` layers."""
    hidden, inner, count = model.hidden_size, model.experts.intermediate_size, n * model.experts.count // ranks
    table = Table()
    for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
        table[f"routed_{name}"] = ("int8", (count, *shape))
        table[f"routed_{name}_scale"] = ("float32", (count, shape[0]))
    return table
