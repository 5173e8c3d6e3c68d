# mypy: ignore-errors
"""Prefill of chunks of several rows. In PyPTO's language: see `__init__.py`."""

import pypto.language as pl


@pl.jit
def prefill(
    input_ids: pl.Tensor[[TOKENS_IN], pl.INT32],
    seq_lens: pl.Tensor[[BATCH_IN], pl.INT32],
    chunk_lens: pl.Tensor[[BATCH_IN], pl.INT32],
    chunk_offsets: pl.Tensor[[BATCH_IN], pl.INT32],
    input_rms_weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    wq: pl.Tensor[[HIDDEN_ROWS, QUERIES], pl.BF16],
    wk: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    wv: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    q_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    k_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    rope_cos: pl.Tensor[[POSITIONS, HEAD_DIM], pl.FP32],
    rope_sin: pl.Tensor[[POSITIONS, HEAD_DIM], pl.FP32],
    block_table: pl.Tensor[[TABLE_IN], pl.INT32],
    slot_mapping: pl.Tensor[[TOKENS_IN], pl.INT32],
    k_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    v_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    wo: pl.Tensor[[QUERIES_ROWS, HIDDEN], pl.BF16],
    w_gate: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_up: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_down: pl.Tensor[[INNER_ROWS, HIDDEN], pl.BF16],
    post_rms_weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    final_norm_weight: pl.Tensor[[1, HIDDEN], pl.FP32],
    lm_head_weight: pl.Tensor[[VOCAB, HIDDEN], pl.BF16],
    embed_weight: pl.Tensor[[EMBEDDED, HIDDEN], pl.BF16],
    out: pl.Out[pl.Tensor[[BATCH_IN, VOCAB], pl.FP32]],
):
    tokens = pl.tensor.dim(input_ids, 0)
    rows = pl.tensor.dim(seq_lens, 0)
    table = pl.tensor.dim(block_table, 0) // rows
    hidden = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.FP32)
    cos = pl.create_tensor([TOKENS, HEAD_DIM], dtype=pl.FP32)
    sin = pl.create_tensor([TOKENS, HEAD_DIM], dtype=pl.FP32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="embed"):
        for i in pl.range(tokens):
            token_id = pl.cast(pl.tensor.read(input_ids, [i]), pl.INDEX)
            embedded = pl.slice(embed_weight, [1, HIDDEN], [token_id, 0])
            hidden = pl.assemble(hidden, pl.cast(embedded, target_type=pl.FP32), [i, 0])
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="look_up_rope"):
        for b in pl.range(rows):
            count = pl.cast(pl.tensor.read(chunk_lens, [b]), pl.INDEX)
            offset = pl.cast(pl.tensor.read(chunk_offsets, [b]), pl.INDEX)
            start = pl.cast(pl.tensor.read(seq_lens, [b]), pl.INDEX) - count
            for i in pl.range(count):
                cos = pl.assemble(cos, pl.slice(rope_cos, [1, HEAD_DIM], [start + i, 0]), [offset + i, 0])
                sin = pl.assemble(sin, pl.slice(rope_sin, [1, HEAD_DIM], [start + i, 0]), [offset + i, 0])
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
            count = pl.cast(pl.tensor.read(chunk_lens, [b]), pl.INDEX)
            offset = pl.cast(pl.tensor.read(chunk_offsets, [b]), pl.INDEX)
            start = pl.cast(pl.tensor.read(seq_lens, [b]), pl.INDEX) - count
            for i in pl.range(count):
                attended = attend(
                    queries, k_cache, v_cache, block_table, first_slot, b * table, offset + i, start + i + 1, attended
                )
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
    last = pl.create_tensor([ROWS, HIDDEN], dtype=pl.BF16)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="pick_last"):
        for b in pl.range(rows):
            count = pl.cast(pl.tensor.read(chunk_lens, [b]), pl.INDEX)
            offset = pl.cast(pl.tensor.read(chunk_offsets, [b]), pl.INDEX)
            chosen = pl.max(offset + count - 1, 0)
            last = pl.assemble(last, pl.slice(final, [1, HIDDEN], [chosen, 0]), [b, 0])
    out = project_logits(last, lm_head_weight, rows, out)
    return out
