# mypy: ignore-errors
"""Attention of one token over pages, and the storing of keys and values. In PyPTO's language: see `__init__.py`."""

import pypto.language as pl


@pl.jit.inline
def store_kv(
    keys: pl.Tensor[[TOKENS, KEYS], pl.BF16],
    qkv: pl.Tensor[[TOKENS, QKV], pl.FP32],
    slot_mapping: pl.Tensor[[TOKENS_IN], pl.INT32],
    first_slot: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    k_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    v_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
):
    slots = pl.tensor.dim(k_cache, 0) // KV_HEADS
    key_slots = pl.reshape(k_cache, [slots, KEYS])
    value_slots = pl.reshape(v_cache, [slots, KEYS])
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="store_kv"):
        for token in pl.range(tokens):
            slot = first_slot + pl.cast(pl.tensor.read(slot_mapping, [token]), pl.INDEX)
            key_slots = pl.assemble(key_slots, pl.slice(keys, [1, KEYS], [token, 0]), [slot, 0])
            value = pl.slice(qkv, [1, KEYS], [token, QUERIES + KEYS])
            value_slots = pl.assemble(value_slots, pl.cast(value, target_type=pl.BF16), [slot, 0])
    return k_cache, v_cache


@pl.jit.inline
def attend(
    queries: pl.Tensor[[QUERY_TOKENS, QUERIES], pl.BF16],
    k_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    v_cache: pl.Tensor[[KV_ROWS, HEAD_DIM], pl.BF16],
    block_table: pl.Tensor[[TABLE_IN], pl.INT32],
    first_slot: pl.Scalar[pl.INDEX],
    first_entry: pl.Scalar[pl.INDEX],
    token: pl.Scalar[pl.INDEX],
    length: pl.Scalar[pl.INDEX],
    attended: pl.Tensor[[QUERY_ROWS, HEAD_DIM], pl.BF16],
):
    """Attend from one token to the first `length` tokens of its row, page by page.

    A tile holds the queries of a KV head; the rows after them are queries of other heads, computed and dropped.
    """
    slots = pl.tensor.dim(k_cache, 0) // KV_HEADS
    key_slots = pl.reshape(k_cache, [slots, KEYS])
    value_slots = pl.reshape(v_cache, [slots, KEYS])
    query_rows = pl.reshape(queries, [QUERY_ROWS, HEAD_DIM])
    pages = (length + PAGE - 1) // PAGE
    scores = pl.create_tensor([PARTS, PAGE], dtype=pl.FP32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="scores"):
        for part in pl.range(pages * KV_HEADS):
            page = part // KV_HEADS
            head = part - page * KV_HEADS
            block = pl.cast(pl.tensor.read(block_table, [first_entry + page]), pl.INDEX)
            query = pl.slice(query_rows, [ROWS, HEAD_DIM], [token * HEADS + head * GROUP, 0])
            key = pl.slice(key_slots, [PAGE, HEAD_DIM], [first_slot + block * PAGE, head * HEAD_DIM])
            score = pl.matmul(query, key, b_trans=True, out_dtype=pl.FP32)
            scores = pl.assemble(scores, score, [part * ROWS, 0])
    weights = pl.create_tensor([PARTS, PAGE], dtype=pl.BF16)
    maxima = pl.create_tensor([PARTS, 1], dtype=pl.FP32)
    sums = pl.create_tensor([PARTS, 1], dtype=pl.FP32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="softmax"):
        for part in pl.range(pages * KV_HEADS):
            page = part // KV_HEADS
            valid = pl.min(PAGE, length - page * PAGE)
            known = pl.slice(scores, [ROWS, PAGE], [part * ROWS, 0], valid_shape=[ROWS, valid])
            scaled = pl.mul(pl.fillpad(known, pad_value=pl.PadValue.min), SCALE)
            maximum = pl.row_max(scaled)
            weight = pl.cast(pl.exp(pl.row_expand_sub(scaled, maximum)), target_type=pl.BF16)
            weights = pl.assemble(weights, weight, [part * ROWS, 0])
            maxima = pl.assemble(maxima, maximum, [part * ROWS, 0])
            sums = pl.assemble(sums, pl.row_sum(pl.cast(weight, target_type=pl.FP32)), [part * ROWS, 0])
    partial = pl.create_tensor([PARTS, HEAD_DIM], dtype=pl.FP32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="values"):
        for part in pl.range(pages * KV_HEADS):
            page = part // KV_HEADS
            head = part - page * KV_HEADS
            block = pl.cast(pl.tensor.read(block_table, [first_entry + page]), pl.INDEX)
            page_weights = pl.slice(weights, [ROWS, PAGE], [part * ROWS, 0])
            value = pl.slice(value_slots, [PAGE, HEAD_DIM], [first_slot + block * PAGE, head * HEAD_DIM])
            partial = pl.assemble(partial, pl.matmul(page_weights, value, out_dtype=pl.FP32), [part * ROWS, 0])
    for head in pl.parallel(0, KV_HEADS, 1):
        with pl.at(level=pl.Level.CORE_GROUP, name_hint="merge_pages"):
            total = pl.slice(partial, [ROWS, HEAD_DIM], [head * ROWS, 0])
            most = pl.slice(maxima, [ROWS, 1], [head * ROWS, 0])
            divisor = pl.slice(sums, [ROWS, 1], [head * ROWS, 0])
            for page in pl.range(1, pages):
                part = (page * KV_HEADS + head) * ROWS
                page_most = pl.slice(maxima, [ROWS, 1], [part, 0])
                new_most = pl.maximum(most, page_most)
                before = pl.exp(pl.sub(most, new_most))
                here = pl.exp(pl.sub(page_most, new_most))
                page_divisor = pl.slice(sums, [ROWS, 1], [part, 0])
                page_total = pl.slice(partial, [ROWS, HEAD_DIM], [part, 0])
                divisor = pl.add(pl.mul(before, divisor), pl.mul(here, page_divisor))
                total = pl.add(pl.row_expand_mul(total, before), pl.row_expand_mul(page_total, here))
                most = new_most
            merged = pl.cast(pl.row_expand_div(total, divisor), target_type=pl.BF16)
            merged = pl.set_validshape(merged, GROUP, HEAD_DIM)
            attended = pl.assemble(attended, merged, [token * HEADS + head * GROUP, 0])
    return attended
