# mypy: ignore-errors
"""Sums over several devices. In PyPTO's language: see `__init__.py`; `DEVICES` have a part of each change."""

import pypto.language as pl
import pypto.language.distributed as pld


@pl.jit.incore
def exchange_change(
    change: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    hidden: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    summed: pl.Out[pl.Tensor[[TOKENS, HIDDEN], pl.FP32]],
    changes: pld.DistributedTensor[[CHANGE_ROWS, HIDDEN], pl.FP32],
    arrived: pld.DistributedTensor[[DEVICES, 1], pl.INT32],
    device: pl.Scalar[pl.INT32],
    number: pl.Scalar[pl.INT32],
    tokens: pl.Scalar[pl.INT32],
):
    """Write this device's part of a change into all windows, wait for the others', and add them in order of devices.

    Changes are numbered from 1 on, as a wait must be for a value that was passed in. Even and odd ones have windows of
    their own: a device writes change i + 2 when all others told it of change i + 1, and so have read change i.
    """
    first = (number - number // 2 * 2) * DEVICES * TOKENS
    for row in pl.range(0, tokens, ROWS):
        tile = pl.load(change, [row, 0], [ROWS, HIDDEN])
        pl.store(tile, [first + device * TOKENS + row, 0], changes)
    for peer in pl.range(DEVICES):
        if peer != device:
            for row in pl.range(0, tokens, ROWS):
                pld.tensor.put(
                    dst=changes,
                    peer=peer,
                    src=change,
                    dst_offsets=[first + device * TOKENS + row, 0],
                    src_offsets=[row, 0],
                    shape=[ROWS, HIDDEN],
                )
    for peer in pl.range(DEVICES):
        if peer != device:
            pld.system.notify(arrived, peer=peer, offsets=[device, 0], value=1, op=pld.NotifyOp.AtomicAdd)
    for peer in pl.range(DEVICES):
        if peer != device:
            pld.system.wait(signal=arrived, offsets=[peer, 0], expected=number, cmp=pld.WaitCmp.Ge)
    for row in pl.range(0, tokens, ROWS):
        total = pl.load(hidden, [row, 0], [ROWS, HIDDEN])
        for each in pl.range(DEVICES):
            total = pl.add(total, pl.load(changes, [first + each * TOKENS + row, 0], [ROWS, HIDDEN]))
        pl.store(total, [row, 0], summed)
    return summed


@pl.jit.inline
def add_change(
    change: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    hidden: pl.Tensor[[TOKENS, HIDDEN], pl.FP32],
    place: pl.Scalar[pl.INDEX],
    tokens: pl.Scalar[pl.INDEX],
    changes: pld.DistributedTensor[[CHANGE_ROWS, HIDDEN], pl.FP32],
    arrived: pld.DistributedTensor[[DEVICES, 1], pl.INT32],
    device: pl.Scalar[pl.INT32],
):
    """Add the parts of a change that all devices have to the hidden state: number `place` of those of a step."""
    summed = pl.create_tensor([TOKENS, HIDDEN], dtype=pl.FP32)
    number = pl.cast(place + 1, pl.INT32)
    token_count = pl.cast(tokens, pl.INT32)
    summed = exchange_change(change, hidden, summed, changes, arrived, device, number, token_count)
    return summed
