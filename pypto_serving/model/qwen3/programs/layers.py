# mypy: ignore-errors
"""The kernels of a layer, but for attention. In PyPTO's language: see `__init__.py` for names in capitals.

All work is done for tiles of ROWS tokens, one way in prefill and decode, and a token's values depend on no other row of
its tile. So a token gets the same bits however its prompt was cut.
"""

import pypto.language as pl


@pl.jit.inline
def rms_norm(
    hidden: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    normed: pl.Tensor[[TOKENS, HIDDEN], pl.BF16],
):
    for row in pl.parallel(0, tokens, ROWS):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="rms_norm"):
            tile = pl.slice(hidden, [ROWS, HIDDEN], [row, 0])
            squares = pl.reshape(pl.row_sum(pl.mul(tile, tile)), [1, ROWS])
            scale = pl.reshape(pl.rsqrt(pl.add(pl.mul(squares, PER_HIDDEN), EPS)), [ROWS, 1])
            scaled = pl.col_expand_mul(pl.row_expand_mul(tile, scale), pl.slice(weight, [1, HIDDEN], [layer, 0]))
            normed = pl.assemble(normed, pl.cast(scaled, target_type=pl.BF16), [row, 0])
    return normed


@pl.jit.inline
def project_qkv(
    normed: pl.Tensor[[TOKENS, HIDDEN], pl.BF16],
    wq: pl.Tensor[[HIDDEN_ROWS, QUERIES], pl.BF16],
    wk: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    wv: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    qkv: pl.Tensor[[TOKENS, QKV], pl.FP32],
):
    for row in pl.parallel(0, tokens, ROWS):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="project_q"):
            for column in pl.range(0, QUERIES, Q_TILE):
                tile = pl.slice(normed, [ROWS, HIDDEN], [row, 0])
                weights = pl.slice(wq, [HIDDEN, Q_TILE], [layer * HIDDEN, column])
                qkv = pl.assemble(qkv, pl.matmul(tile, weights, out_dtype=pl.FP32), [row, column])
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="project_kv"):
            for column in pl.range(0, KEYS, KV_TILE):
                tile = pl.slice(normed, [ROWS, HIDDEN], [row, 0])
                k_weights = pl.slice(wk, [HIDDEN, KV_TILE], [layer * HIDDEN, column])
                v_weights = pl.slice(wv, [HIDDEN, KV_TILE], [layer * HIDDEN, column])
                k_tile = pl.matmul(tile, k_weights, out_dtype=pl.FP32)
                qkv = pl.assemble(qkv, k_tile, [row, QUERIES + column])
                v_tile = pl.matmul(tile, v_weights, out_dtype=pl.FP32)
                qkv = pl.assemble(qkv, v_tile, [row, QUERIES + KEYS + column])
    return qkv


@pl.jit.inline
def rotate_queries(
    qkv: pl.Tensor[[TOKENS, QKV], pl.FP32],
    weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    cos: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    sin: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    queries: pl.Tensor[[QUERY_TOKENS, QUERIES], pl.BF16],
):
    for row in pl.parallel(0, tokens, ROWS):
        for head in pl.parallel(0, HEADS, 1):
            with pl.at(level=pl.Level.CORE_GROUP, name_hint="rotate_queries"):
                tile = pl.slice(qkv, [ROWS, HEAD_DIM], [row, head * HEAD_DIM])
                squares = pl.reshape(pl.row_sum(pl.mul(tile, tile)), [1, ROWS])
                scale = pl.reshape(pl.rsqrt(pl.add(pl.mul(squares, PER_HEAD), EPS)), [ROWS, 1])
                low = pl.slice(qkv, [ROWS, HALF], [row, head * HEAD_DIM])
                low = pl.col_expand_mul(pl.row_expand_mul(low, scale), pl.slice(weight, [1, HALF], [layer, 0]))
                high = pl.slice(qkv, [ROWS, HALF], [row, head * HEAD_DIM + HALF])
                high = pl.col_expand_mul(pl.row_expand_mul(high, scale), pl.slice(weight, [1, HALF], [layer, HALF]))
                cos_tile = pl.slice(cos, [ROWS, HALF], [row, 0])
                sin_tile = pl.slice(sin, [ROWS, HALF], [row, 0])
                first = pl.sub(pl.mul(low, cos_tile), pl.mul(high, sin_tile))
                second = pl.add(pl.mul(high, cos_tile), pl.mul(low, sin_tile))
                queries = pl.assemble(queries, pl.cast(first, target_type=pl.BF16), [row, head * HEAD_DIM])
                queries = pl.assemble(queries, pl.cast(second, target_type=pl.BF16), [row, head * HEAD_DIM + HALF])
    return queries


@pl.jit.inline
def rotate_keys(
    qkv: pl.Tensor[[TOKENS, QKV], pl.FP32],
    weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    cos: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    sin: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    keys: pl.Tensor[[TOKENS, KEYS], pl.BF16],
):
    for row in pl.parallel(0, tokens, ROWS):
        for head in pl.parallel(0, KV_HEADS, 1):
            with pl.at(level=pl.Level.CORE_GROUP, name_hint="rotate_keys"):
                tile = pl.slice(qkv, [ROWS, HEAD_DIM], [row, QUERIES + head * HEAD_DIM])
                squares = pl.reshape(pl.row_sum(pl.mul(tile, tile)), [1, ROWS])
                scale = pl.reshape(pl.rsqrt(pl.add(pl.mul(squares, PER_HEAD), EPS)), [ROWS, 1])
                low = pl.slice(qkv, [ROWS, HALF], [row, QUERIES + head * HEAD_DIM])
                low = pl.col_expand_mul(pl.row_expand_mul(low, scale), pl.slice(weight, [1, HALF], [layer, 0]))
                high = pl.slice(qkv, [ROWS, HALF], [row, QUERIES + head * HEAD_DIM + HALF])
                high = pl.col_expand_mul(pl.row_expand_mul(high, scale), pl.slice(weight, [1, HALF], [layer, HALF]))
                cos_tile = pl.slice(cos, [ROWS, HALF], [row, 0])
                sin_tile = pl.slice(sin, [ROWS, HALF], [row, 0])
                first = pl.sub(pl.mul(low, cos_tile), pl.mul(high, sin_tile))
                second = pl.add(pl.mul(high, cos_tile), pl.mul(low, sin_tile))
                keys = pl.assemble(keys, pl.cast(first, target_type=pl.BF16), [row, head * HEAD_DIM])
                keys = pl.assemble(keys, pl.cast(second, target_type=pl.BF16), [row, head * HEAD_DIM + HALF])
    return keys


@pl.jit.inline
def project_attended(
    attended: pl.Tensor[[QUERY_ROWS, HEAD_DIM], pl.BF16],
    wo: pl.Tensor[[QUERIES_ROWS, HIDDEN], pl.BF16],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    change: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
):
    attended_tokens = pl.reshape(attended, [QUERY_TOKENS, QUERIES])
    for row in pl.parallel(0, tokens, ROWS):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="project_attended"):
            for column in pl.range(0, HIDDEN, ATTENDED_TILE):
                tile = pl.slice(attended_tokens, [ROWS, QUERIES], [row, 0])
                weights = pl.slice(wo, [QUERIES, ATTENDED_TILE], [layer * QUERIES, column])
                change = pl.assemble(change, pl.matmul(tile, weights, out_dtype=pl.FP32), [row, column])
    return change


@pl.jit.inline
def add_change(
    change: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    hidden: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    place: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
):
    """Add a change to the hidden state: number `place` of those of a step."""
    for row in pl.parallel(0, tokens, ROWS):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="add_change"):
            tile = pl.add(pl.slice(hidden, [ROWS, HIDDEN], [row, 0]), pl.slice(change, [ROWS, HIDDEN], [row, 0]))
            hidden = pl.assemble(hidden, tile, [row, 0])
    return hidden


@pl.jit.inline
def mlp(
    normed: pl.Tensor[[TOKENS, HIDDEN], pl.BF16],
    w_gate: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_up: pl.Tensor[[HIDDEN_ROWS, INTERMEDIATE], pl.BF16],
    w_down: pl.Tensor[[INNER_ROWS, HIDDEN], pl.BF16],
    layer: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    change: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
):
    gates = pl.create_tensor([TOKENS, INTERMEDIATE], dtype=pl.FP32)
    ups = pl.create_tensor([TOKENS, INTERMEDIATE], dtype=pl.FP32)
    inner = pl.create_tensor([TOKENS, INTERMEDIATE], dtype=pl.BF16)
    for row in pl.parallel(0, tokens, ROWS):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="gate_and_up"):
            for column in pl.range(0, INTERMEDIATE, INNER_TILE):
                tile = pl.slice(normed, [ROWS, HIDDEN], [row, 0])
                gate_weights = pl.slice(w_gate, [HIDDEN, INNER_TILE], [layer * HIDDEN, column])
                gate = pl.matmul(tile, gate_weights, out_dtype=pl.FP32)
                gates = pl.assemble(gates, gate, [row, column])
                up_weights = pl.slice(w_up, [HIDDEN, INNER_TILE], [layer * HIDDEN, column])
                up = pl.matmul(tile, up_weights, out_dtype=pl.FP32)
                ups = pl.assemble(ups, up, [row, column])
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="silu"):
            for column in pl.range(0, INTERMEDIATE, INNER_TILE):
                gate_tile = pl.slice(gates, [ROWS, INNER_TILE], [row, column])
                up_tile = pl.slice(ups, [ROWS, INNER_TILE], [row, column])
                sigmoid = pl.recip(pl.add(pl.exp(pl.neg(gate_tile)), 1.0))
                product = pl.mul(pl.mul(gate_tile, sigmoid), up_tile)
                inner = pl.assemble(inner, pl.cast(product, target_type=pl.BF16), [row, column])
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="project_inner"):
            for column in pl.range(0, HIDDEN, DOWN_TILE):
                inner_tile = pl.slice(inner, [ROWS, INTERMEDIATE], [row, 0])
                weights = pl.slice(w_down, [INTERMEDIATE, DOWN_TILE], [layer * INTERMEDIATE, column])
                change = pl.assemble(change, pl.matmul(inner_tile, weights, out_dtype=pl.FP32), [row, column])
    return change


@pl.jit.inline
def compute_queries(
    hidden: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    input_rms_weight: pl.Tensor[[LAYERS, HIDDEN], pl.FP32],
    wq: pl.Tensor[[HIDDEN_ROWS, QUERIES], pl.BF16],
    wk: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    wv: pl.Tensor[[HIDDEN_ROWS, KEYS], pl.BF16],
    q_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    k_norm_weight: pl.Tensor[[LAYERS, HEAD_DIM], pl.FP32],
    cos: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    sin: pl.Tensor[[TOKENS, HEAD_DIM], pl.FP32],
    slot_mapping: pl.Tensor[[TOKENS_IN], pl.INT32],
    k_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    v_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    layer: pl.Scalar[pl.INDEX],
    first_slot: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    queries: pl.Tensor[[QUERY_TOKENS, QUERIES], pl.BF16],
):
    """Compute the first part of a layer: store keys and values, return queries."""
    normed = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.BF16)
    normed = rms_norm(hidden, input_rms_weight, layer, tokens, normed)
    qkv = pl.create_tensor([TOKENS, QKV], dtype=pl.FP32)
    qkv = project_qkv(normed, wq, wk, wv, layer, tokens, qkv)
    queries = rotate_queries(qkv, q_norm_weight, cos, sin, layer, tokens, queries)
    keys = pl.create_tensor([TOKENS, KEYS], dtype=pl.BF16)
    keys = rotate_keys(qkv, k_norm_weight, cos, sin, layer, tokens, keys)
    k_cache, v_cache = store_kv(keys, qkv, slot_mapping, first_slot, tokens, k_cache, v_cache)
    return queries
