"""The arguments of pypto-lib's DeepSeek V4 Flash programs: order, dtypes, shapes and roles. Torch-free.

Every shape begins with the number of ranks, and rank r has slice r; counts of all ranks, and scalars, are the
exception. Sizes with a name: T tokens of a prefill, VOCAB rows of the embedding, and the blocks of a pool over all of
its layers, as in ORI_BLOCKS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pypto_serving.model.contract import Argument, Role
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.pypto.pools import MAX_TOKENS, POOLS, TABLE_WIDTHS

REQUESTS, STEP_TOKENS = 4, 2
"""Requests of a rank in a decode, and tokens of each."""
DECODE_TOKENS = LOGIT_ROWS = REQUESTS * STEP_TOKENS
PREFILL_TILE = 128
"""Tokens that a prefill computes at a time."""
IDS_PAD = 8

FlashStage = Literal["prefill", "decode", "decode_mtp", "prefill_mtp"]
Table = dict[str, tuple[str, tuple[int | str, ...]]]
"""Dtype and shape of one rank, by the name of the argument."""

_OF_ALL_RANKS = ("num_tokens_per_owner", "mtp_num_tokens", "num_tokens")
_OUTPUTS = {"pre_hc_hidden_out", "hidden_out", "logits", "sampled_ids", "mtp_accepted_counts", "mtp_position_ids"}
_OUTPUTS |= {"mtp_input_ids", "mtp_hidden_out", "mtp_next_pre_hc_hidden", "mtp_logits", "mtp_sampled_ids"}
_STATES = {"mtp_tail_token_ids", "mtp_tail_positions", "mtp_tail_pre_hc_pool", "mtp_state_tokens", "mtp_state_meta"}
"""What MTP keeps on the device between steps."""


def stages(model: DeepseekV4Config, ranks: int, tensor: int) -> dict[FlashStage, tuple[Argument, ...]]:
    """Return the arguments of all programs; each group of `tensor` ranks has the output layer once."""
    shared, draft = _weights(model, ranks, tensor) | _pools(model), _draft(model, ranks)
    return {
        "prefill": _stage(PREFILL, shared, _prefill(model, ranks), ranks),
        "decode": _stage(DECODE, shared, _decode(model, ranks), ranks),
        "decode_mtp": _stage(f"{DECODE} {DECODE_MTP}", shared | draft, _decode_mtp(model, ranks), ranks),
        "prefill_mtp": _stage(
            PREFILL_MTP,
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


def _stage(order: str, shared: Table, own: Table, ranks: int) -> tuple[Argument, ...]:
    """Put arguments in order, each with the axis of ranks in front."""
    found = []
    for name in order.split():
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
    hidden, table = model.hidden_size, _layer(model, ranks, 1) | {"mtp_norm_w": ("bfloat16", (model.hidden_size,))}
    for name in ("e_proj", "h_proj"):
        table[f"{name}_w"] = ("int8", (hidden, hidden))
        table |= {f"{name}_{more}": ("float32", (hidden,)) for more in ("w_scale", "smooth")}
    table |= dict.fromkeys(("enorm_w", "hnorm_w"), ("float32", (hidden,)))
    table |= {f"mtp_{name}": value for name, value in _head_mix(model).items()}
    table["kv_cache"] = ("bfloat16", ("MTP_BLOCKS", POOLS["ori"].tokens, 1, model.head_dim))
    return {f"mtp_{name}": value for name, value in table.items()}


def _weights(model: DeepseekV4Config, ranks: int, tensor: int) -> Table:
    assert model.indexer is not None
    hidden, dim, key, heads = model.hidden_size, model.head_dim, model.indexer.head_dim, model.indexer.num_heads
    csa, hca = len(model.layers_of("csa")), len(model.layers_of("hca"))
    return {
        **_layer(model, ranks, model.num_layers),
        **_head_mix(model),
        **_compressor("hca_cmp", hca, model.hca_ratio, dim, dim, hidden),
        **_compressor("csa_cmp", csa, model.csa_ratio, 2 * dim, dim, hidden),
        **_compressor("csa_inner", csa, model.csa_ratio, 2 * key, key, hidden),
        "csa_idx_wq_b": ("int8", (csa * model.q_lora_rank, heads * key)),
        "csa_idx_wq_b_scale": ("float32", (csa * heads * key,)),
        "csa_weights_proj": ("bfloat16", (csa * hidden, heads)),
        "csa_hadamard_idx": ("bfloat16", (csa * key, key)),
        "embed_weight": ("bfloat16", ("VOCAB", hidden)),
        "lm_head_weight": ("bfloat16", (model.vocab_size // tensor, hidden)),
        "final_norm_w": ("bfloat16", (hidden,)),
        **dict.fromkeys(("freqs_cos", "freqs_sin"), ("bfloat16", (2, MAX_TOKENS, model.rope_dim))),
    }


def _compressor(prefix: str, layers: int, ratio: int, width: int, dim: int, hidden: int) -> Table:
    return {
        **{f"{prefix}_{name}": ("bfloat16", (layers * width, hidden)) for name in ("wkv", "wgate")},
        f"{prefix}_ape": ("float32", (layers * ratio, width)),
        f"{prefix}_norm_w": ("bfloat16", (layers * dim,)),
    }


def _head_mix(model: DeepseekV4Config) -> Table:
    streams = model.hyper.streams
    return {
        "hc_head_fn": ("float32", (streams, streams * model.hidden_size)),
        "hc_head_scale": ("float32", (1,)),
        "hc_head_base": ("float32", (streams,)),
    }


def _layer(model: DeepseekV4Config, ranks: int, n: int) -> Table:
    """Return the weights that layers of all kinds have, of `n` layers and of a rank with its part of the experts."""
    hidden, heads, dim, q = model.hidden_size, model.num_heads, model.head_dim, model.q_lora_rank
    groups, out = model.o_groups, model.o_lora_rank
    table: Table = {
        "attn_norm_w": ("bfloat16", (n * hidden,)),
        "wq_a": ("bfloat16", (n * hidden, q)),
        "wq_b": ("int8", (n * q, heads * dim)),
        "wq_b_scale": ("float32", (n * heads * dim,)),
        "wkv": ("bfloat16", (n * hidden, dim)),
        "gamma_cq": ("bfloat16", (n * q,)),
        "gamma_ckv": ("bfloat16", (n * dim,)),
        "attn_sink": ("float32", (n * heads,)),
        "wo_a": ("bfloat16", (n * groups, out, heads * dim // groups)),
        "wo_b": ("int8", (n * hidden, groups * out)),
        "wo_b_scale": ("float32", (n * hidden,)),
        "norm_w": ("bfloat16", (n * hidden,)),
    }
    for block in ("attn", "ffn"):
        table[f"hc_{block}_fn"] = ("float32", (n * model.hyper.mixes, model.hyper.streams * hidden))
        table[f"hc_{block}_scale"] = ("float32", (n * 3,))
        table[f"hc_{block}_base"] = ("float32", (n * model.hyper.mixes,))
    return table | _experts(model, ranks, n)


def _experts(model: DeepseekV4Config, ranks: int, n: int) -> Table:
    hidden, experts = model.hidden_size, model.experts
    inner, local = experts.intermediate_size, experts.count // ranks
    table: Table = {
        "gate_w": ("float32", (n * experts.count, hidden)),
        "gate_bias": ("float32", (n * experts.count,)),
        "tid2eid": ("int32", (n * model.vocab_size, experts.per_token)),
    }
    sizes: Mapping[str, tuple[int, int]] = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for name, (rows, columns) in sizes.items():
        table[f"routed_{name}"] = ("int8", (n * local, rows, columns))
        table[f"routed_{name}_scale"] = ("float32", (n * local, rows))
        table[f"shared_{name}"] = ("int8", (n * rows, columns))
        table[f"shared_{name}_scale"] = ("float32", (n * rows,))
    return table


PREFILL = (
    "x_hc hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv gamma_cq gamma_ckv kv_cache "
    "attn_sink wo_a wo_b wo_b_scale hca_cmp_kv csa_cmp_kv hca_cmp_wkv hca_cmp_wgate hca_cmp_ape hca_cmp_norm_w "
    "hca_compress_state csa_cmp_wkv csa_cmp_wgate csa_cmp_ape csa_cmp_norm_w csa_compress_state csa_hadamard_idx "
    "csa_idx_wq_b csa_idx_wq_b_scale csa_weights_proj csa_inner_wkv csa_inner_wgate csa_inner_ape "
    "csa_inner_norm_w csa_inner_compress_state idx_kv_cache idx_kv_scale hca_compress_state_block_table "
    "csa_compress_state_block_table csa_inner_compress_state_block_table freqs_cos freqs_sin ori_block_table "
    "hca_cmp_block_table csa_cmp_block_table idx_block_table ori_slot_mapping position_ids input_ids "
    "hca_cmp_slot_mapping hca_state_slot_mapping csa_cmp_slot_mapping csa_idx_slot_mapping csa_state_slot_mapping "
    "csa_inner_state_slot_mapping hc_ffn_fn hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid routed_w1 "
    "routed_w1_scale routed_w3 routed_w3_scale routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 "
    "shared_w3_scale shared_w2 shared_w2_scale hc_head_fn hc_head_scale hc_head_base final_norm_w "
    "pre_hc_hidden_out lm_head_weight hidden_out logits num_tokens_per_owner logit_row_indices"
)
"""Those of l3_prefill_fwd."""

DECODE = (
    "embed_weight hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv gamma_cq gamma_ckv "
    "kv_cache attn_sink wo_a wo_b wo_b_scale hca_cmp_wkv hca_cmp_wgate hca_cmp_ape hca_cmp_norm_w "
    "hca_compress_state csa_cmp_wkv csa_cmp_wgate csa_cmp_ape csa_cmp_norm_w csa_compress_state csa_idx_wq_b "
    "csa_idx_wq_b_scale csa_weights_proj csa_hadamard_idx csa_inner_wkv csa_inner_wgate csa_inner_ape "
    "csa_inner_norm_w csa_inner_compress_state hca_cmp_kv csa_cmp_kv idx_kv_cache idx_kv_scale hc_ffn_fn "
    "hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid routed_w1 routed_w1_scale routed_w3 routed_w3_scale "
    "routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 shared_w3_scale shared_w2 shared_w2_scale "
    "freqs_cos freqs_sin block_table position_ids kv_seq_lens hca_compress_state_block_table "
    "csa_compress_state_block_table csa_inner_compress_state_block_table hca_cmp_block_table csa_cmp_block_table "
    "idx_block_table block_counts input_ids hc_head_fn hc_head_scale hc_head_base final_norm_w pre_hc_hidden_out "
    "lm_head_weight hidden_out logits sampled_ids num_tokens_per_owner logit_row_indices"
)
"""Those of l3_decode_fwd."""

DECODE_MTP = (
    "mtp_tail_token_ids mtp_tail_positions mtp_tail_pre_hc_pool mtp_accepted_counts mtp_tail_slot_ids "
    "mtp_state_generations mtp_state_tokens mtp_state_meta mtp_position_ids mtp_enorm_w mtp_hnorm_w mtp_e_proj_w "
    "mtp_e_proj_w_scale mtp_e_proj_smooth mtp_h_proj_w mtp_h_proj_w_scale mtp_h_proj_smooth mtp_hc_attn_fn "
    "mtp_hc_attn_scale mtp_hc_attn_base mtp_attn_norm_w mtp_wq_a mtp_wq_b mtp_wq_b_scale mtp_wkv mtp_gamma_cq "
    "mtp_gamma_ckv mtp_kv_cache mtp_attn_sink mtp_wo_a mtp_wo_b mtp_wo_b_scale mtp_hc_ffn_fn mtp_hc_ffn_scale "
    "mtp_hc_ffn_base mtp_norm_w mtp_gate_w mtp_gate_bias mtp_tid2eid mtp_input_ids mtp_routed_w1 "
    "mtp_routed_w1_scale mtp_routed_w3 mtp_routed_w3_scale mtp_routed_w2 mtp_routed_w2_scale mtp_shared_w1 "
    "mtp_shared_w1_scale mtp_shared_w3 mtp_shared_w3_scale mtp_shared_w2 mtp_shared_w2_scale mtp_mtp_hc_head_fn "
    "mtp_mtp_hc_head_scale mtp_mtp_hc_head_base mtp_mtp_norm_w mtp_hidden_out mtp_next_pre_hc_hidden mtp_logits "
    "mtp_sampled_ids mtp_logit_row_indices mtp_num_tokens"
)
"""What l3_decode_fwd_mtp takes after those of l3_decode_fwd."""

PREFILL_MTP = (
    "hidden_states prev_hidden_states enorm_w hnorm_w e_proj_w e_proj_w_scale e_proj_smooth h_proj_w "
    "h_proj_w_scale h_proj_smooth hc_attn_fn hc_attn_scale hc_attn_base attn_norm_w wq_a wq_b wq_b_scale wkv "
    "gamma_cq gamma_ckv freqs_cos freqs_sin kv_cache ori_block_table ori_slot_mapping position_ids attn_sink wo_a "
    "wo_b wo_b_scale hc_ffn_fn hc_ffn_scale hc_ffn_base norm_w gate_w gate_bias tid2eid input_ids routed_w1 "
    "routed_w1_scale routed_w3 routed_w3_scale routed_w2 routed_w2_scale shared_w1 shared_w1_scale shared_w3 "
    "shared_w3_scale shared_w2 shared_w2_scale mtp_hc_head_fn mtp_hc_head_scale mtp_hc_head_base mtp_norm_w "
    "lm_head_weight hidden_out pre_hc_hidden_out logits logit_row_indices num_tokens"
)
"""Those of l3_mtp_prefill_fwd."""
