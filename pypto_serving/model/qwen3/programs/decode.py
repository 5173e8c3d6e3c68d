# mypy: ignore-errors
"""Decode of one token of each row. In PyPTO's language: see `__init__.py`."""

import pypto.language as pl


@pl.jit
def decode(
    input_rms_weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    wq: pl.Tensor[[HIDDEN_ROWS, QUERIES], pl.BF16],
    wk: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    wv: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    q_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    k_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    seq_lens: pl.Tensor[[BATCH_IN], pl.INT32],
    block_table: pl.Tensor[[TABLE_IN], pl.INT32],
    slot_mapping: pl.Tensor[[TOKENS_IN], pl.INT32],
    rope_cos: pl.Tensor[[POSITIONS, HEAD_DIM], pl.FP32],
    rope_sin: pl.Tensor[[POSITIONS, HEAD_DIM], pl.FP32],
    k_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    v_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    wo: pl.Tensor[[QUERIES_ROWS, HIDDEN], pl.BF16],
    w_gate: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_up: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_down: pl.Tensor[[INNER_ROWS, HIDDEN], pl.BF16],
    post_rms_weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    final_norm_weight: pl.Tensor[[1, HIDDEN], pl.FP32],
    lm_head_weight: pl.Tensor[[VOCAB, HIDDEN], pl.BF16],
    out: pl.Out[pl.Tensor[[BATCH_IN, VOCAB], pl.FP32]],
    embed_weight: pl.Tensor[[EMBEDDED, HIDDEN], pl.BF16],
    sampled_ids_in: pl.Tensor[[BATCH_IN, IDS], pl.INT32],
    sampled_ids: pl.Out[pl.Tensor[[BATCH_IN, IDS], pl.INT32]],
    next_hidden: pl.Out[pl.Tensor[[BATCH_IN, HIDDEN], pl.BF16]],
):
    rows = pl.tensor.dim(seq_lens, 0)
    tokens = rows
    table = pl.tensor.dim(block_table, 0) // rows
    hidden = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.FP32)
    cos = pl.create_tensor([TOKENS, HEAD_DIM], dtype=pl.FP32)
    sin = pl.create_tensor([TOKENS, HEAD_DIM], dtype=pl.FP32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="embed"):
        for b in pl.range(rows):
            token_id = pl.cast(pl.tensor.read(sampled_ids_in, [b, 0]), pl.INDEX)
            embedded = pl.slice(embed_weight, [1, HIDDEN], [token_id, 0])
            next_hidden = pl.assemble(next_hidden, embedded, [b, 0])
            hidden = pl.assemble(hidden, pl.cast(embedded, target_type=pl.FP32), [b, 0])
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="look_up_rope"):
        for b in pl.range(rows):
            position = pl.max(pl.cast(pl.tensor.read(seq_lens, [b]), pl.INDEX) - 1, 0)
            cos = pl.assemble(cos, pl.slice(rope_cos, [1, HEAD_DIM], [position, 0]), [b, 0])
            sin = pl.assemble(sin, pl.slice(rope_sin, [1, HEAD_DIM], [position, 0]), [b, 0])
    layers = pl.tensor.dim(input_rms_weight, 0)
    layer_slots = pl.tensor.dim(k_cache, 0) // KV_HEADS // layers
    for layer in pl.range(layers):
        first_slot = layer * layer_slots
        queries = pl.create_tensor([QUERY_TOKENS, QUERIES], dtype=pl.BF16)
        queries = compute_queries(
            hidden,
            input_rms_weight,
            wq,
            wk,
            wv,
            q_norm_weight,
            k_norm_weight,
            cos,
            sin,
            slot_mapping,
            k_cache,
            v_cache,
            layer,
            first_slot,
            tokens,
            queries,
        )
        attended = pl.create_tensor([QUERY_ROWS, HEAD_DIM], dtype=pl.BF16)
        for b in pl.range(rows):
            length = pl.cast(pl.tensor.read(seq_lens, [b]), pl.INDEX)
            if length > 0:
                attended = attend(queries, k_cache, v_cache, block_table, first_slot, b * table, b, length, attended)
        change = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.FP32)
        change = project_attended(attended, wo, layer, tokens, change)
        hidden = add_change(change, hidden, 2 * layer, tokens)
        post_normed = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.BF16)
        post_normed = rms_norm(hidden, post_rms_weight, layer, tokens, post_normed)
        mlp_change = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.FP32)
        mlp_change = mlp(post_normed, w_gate, w_up, w_down, layer, tokens, mlp_change)
        hidden = add_change(mlp_change, hidden, 2 * layer + 1, tokens)
    final = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.BF16)
    final = rms_norm(hidden, final_norm_weight, 0, tokens, final)
    out = project_logits(final, lm_head_weight, rows, out)
    sampled_ids = choose_ids(out, rows, sampled_ids)
    return out, sampled_ids, next_hidden
