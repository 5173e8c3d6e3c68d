# mypy: ignore-errors
"""The output layer, and greedy choices. In PyPTO's language: see `__init__.py`."""

import pypto.language as pl


@pl.jit.inline
def project_logits(
    normed: pl.Tensor[[ROWS, HIDDEN], pl.BF16],
    lm_head_weight: pl.Tensor[[VOCAB, HIDDEN], pl.BF16],
    rows: pl.Scalar[pl.INDEX],
    out: pl.Tensor[[BATCH_IN, VOCAB], pl.FP32],
):
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="project_logits"):
        for token in pl.range(0, VOCAB, VOCAB_TILE):
            tile = pl.slice(normed, [ROWS, HIDDEN], [0, 0])
            weights = pl.slice(lm_head_weight, [VOCAB_TILE, HIDDEN], [token, 0])
            logits = pl.matmul(tile, weights, out_dtype=pl.FP32, b_trans=True)
            out = pl.assemble(out, pl.set_validshape(logits, rows, VOCAB_TILE), [0, token])
    return out


@pl.jit.inline
def choose_ids(
    out: pl.Tensor[[BATCH_IN, VOCAB], pl.FP32],
    rows: pl.Scalar[pl.INDEX],
    sampled_ids: pl.Tensor[[BATCH_IN, IDS], pl.INT32],
):
    """Choose each row's id of the largest logit: in each tile, then among tiles. The lowest wins ties."""
    maxima = pl.create_tensor([VOCAB_TILES * ROWS, 1], dtype=pl.FP32)
    places = pl.create_tensor([VOCAB_TILES * ROWS, 1], dtype=pl.INT32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="best_of_tiles"):
        for chunk in pl.range(VOCAB_TILES):
            logits = pl.slice(out, [ROWS, VOCAB_TILE], [0, chunk * VOCAB_TILE], valid_shape=[rows, VOCAB_TILE])
            logits = pl.fillpad(logits, pad_value=pl.PadValue.min)
            maxima = pl.assemble(maxima, pl.row_max(logits), [chunk * ROWS, 0])
            places = pl.assemble(places, pl.row_argmax(logits), [chunk * ROWS, 0])
    by_tile = pl.reshape(maxima, [VOCAB_TILES, ROWS])
    best = pl.create_tensor([1, ROWS], dtype=pl.INT32)
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="best_tile"):
        best = pl.assemble(best, pl.col_argmax(pl.slice(by_tile, [VOCAB_TILES, ROWS], [0, 0])), [0, 0])
    with pl.at(level=pl.Level.CORE_GROUP, name_hint="write_ids"):
        for row in pl.range(rows):
            tile = pl.cast(pl.tensor.read(best, [0, row]), pl.INDEX)
            place = pl.cast(pl.tensor.read(places, [tile * ROWS + row, 0]), pl.INDEX)
            pl.tensor.write(sampled_ids, [row, 0], pl.cast(place + tile * VOCAB_TILE, pl.INT32))
            for column in pl.range(1, IDS):
                pl.tensor.write(sampled_ids, [row, column], pl.const(0, pl.INT32))
    return sampled_ids
