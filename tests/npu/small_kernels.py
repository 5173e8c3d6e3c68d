"""The programs of the conformance suite in PyPTO's language, each from host to core."""

import pypto.language as pl
import pypto.language.distributed as pld

SIZE, ROWS, DEVICES = 128, 16, 2


@pl.jit.incore
def double_tile(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    tile = pl.load(given, [0, 0], [SIZE, SIZE])
    return pl.store(pl.add(tile, tile), [0, 0], kept)


@pl.jit
def fill_chip(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    result = double_tile(given, kept)
    return result


@pl.jit.host
def fill(given: pl.Tensor, kept: pl.Out[pl.Tensor]):
    result = fill_chip(given, kept)
    return result


@pl.jit.incore
def add_tiles(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    left = pl.load(given, [0, 0], [SIZE, SIZE])
    right = pl.load(kept, [0, 0], [SIZE, SIZE])
    return pl.store(pl.add(left, right), [0, 0], out)


@pl.jit
def read_chip(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    result = add_tiles(given, kept, out)
    return result


@pl.jit.host
def read(given: pl.Tensor, kept: pl.Tensor, out: pl.Out[pl.Tensor]):
    result = read_chip(given, kept, out)
    return result


@pl.jit.incore
def add_up_tiles(
    given: pl.Tensor[[SIZE, SIZE], pl.FP32],
    kept: pl.Tensor[[SIZE, SIZE], pl.FP32],
    out: pl.Out[pl.Tensor[[SIZE, SIZE], pl.FP32]],
    window: pld.DistributedTensor[[SIZE, SIZE], pl.FP32],
    arrived: pld.DistributedTensor[[DEVICES, 1], pl.INT32],
    device: pl.Scalar[pl.INT32],
):
    for row in pl.range(0, SIZE, ROWS):
        tile = pl.load(kept, [row, 0], [ROWS, SIZE])
        pl.store(tile, [row, 0], window)
    for peer in pl.range(DEVICES):
        if peer != device:
            pld.system.notify(arrived, peer=peer, offsets=[device, 0], value=1, op=pld.NotifyOp.AtomicAdd)
    for peer in pl.range(DEVICES):
        if peer != device:
            pld.system.wait(signal=arrived, offsets=[peer, 0], expected=1, cmp=pld.WaitCmp.Ge)
    for row in pl.range(0, SIZE, ROWS):
        total = pl.add(pl.load(given, [row, 0], [ROWS, SIZE]), pl.load(kept, [row, 0], [ROWS, SIZE]))
        for peer in pl.range(DEVICES):
            if peer != device:
                total = pl.add(total, pld.tile.remote_load(window, peer=peer, offsets=[row, 0], shape=[ROWS, SIZE]))
        pl.store(total, [row, 0], out)
    return out


@pl.jit
def add_up_chip(
    given: pl.Tensor[[SIZE, SIZE], pl.FP32],
    kept: pl.Tensor[[SIZE, SIZE], pl.FP32],
    out: pl.Out[pl.Tensor[[SIZE, SIZE], pl.FP32]],
    window: pld.DistributedTensor[[SIZE, SIZE], pl.FP32],
    arrived: pld.DistributedTensor[[DEVICES, 1], pl.INT32],
    device: pl.Scalar[pl.INT32],
):
    result = add_up_tiles(given, kept, out, window, arrived, device)
    return result


@pl.jit.host
def add_up(
    given: pl.Tensor[[SIZE, SIZE], pl.FP32],
    kept_0: pl.Tensor[[SIZE, SIZE], pl.FP32],
    out_0: pl.Out[pl.Tensor[[SIZE, SIZE], pl.FP32]],
    kept_1: pl.Tensor[[SIZE, SIZE], pl.FP32],
    out_1: pl.Out[pl.Tensor[[SIZE, SIZE], pl.FP32]],
):
    window_buffer = pld.alloc_window_buffer(SIZE * SIZE * 4)
    arrived_buffer = pld.alloc_window_buffer(DEVICES * 4)
    window_0 = pld.window(window_buffer, [SIZE, SIZE], dtype=pl.FP32)
    arrived_0 = pld.window(arrived_buffer, [DEVICES, 1], dtype=pl.INT32)
    add_up_chip(given, kept_0, out_0, window_0, arrived_0, 0, device=0)
    window_1 = pld.window(window_buffer, [SIZE, SIZE], dtype=pl.FP32)
    arrived_1 = pld.window(arrived_buffer, [DEVICES, 1], dtype=pl.INT32)
    add_up_chip(given, kept_1, out_1, window_1, arrived_1, 1, device=1)
