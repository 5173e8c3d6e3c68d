"""Compile CUDA kernels for cards that are not there, as the launches of a real model would have them compiled.

The wrappers of kernels run on meta tensors, and their launches are recorded. Triton's interpreter must be off:
`python -m tests.kernels.cuda.compiling 90` prints one line of JSON a kernel. To add kernels, write a function that
calls their wrappers for a compute capability and put it in CASES. With `first` behind it, only the first form of each
kernel is compiled, and all of those in SUMS.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from pypto_serving.backend.cuda.device import NoCard
from pypto_serving.backend.cuda.sampler import DeviceSampler
from pypto_serving.kernels.cuda import attention
from pypto_serving.kernels.cuda.int4 import Int4Matrix
from pypto_serving.kernels.cuda.launch import Launch, recording
from pypto_serving.kernels.cuda.products import Bf16Matrix, GatedMatrix, SplitMatrix
from pypto_serving.kernels.cuda.quantized import SPAN, Fp8Matrix, Int8Matrix, RoundedRows
from pypto_serving.kernels.cuda.rows import add_norm, embed, gather, split_heads
from pypto_serving.kernels.cuda.step import DispatchTensors, KVPages
from pypto_serving.types.step import BackendLimits
from pypto_serving.util import ceil_div


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def products(capability: int) -> None:
    """Multiply by the matrices of Qwen3 0.6B and 8B, and by one that fits no tile."""
    shapes = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024)]  # queries, keys and values; out; down; head
    shapes += [(6144, 4096), (4096, 4096), (4096, 12288), (151936, 4096), (272, 336)]
    for n, k in shapes:
        matrix = Bf16Matrix(empty(n, k))
        matrix.bulk = capability >= 90
        for rows in (1, 24, 64, 128, 256, 512, 2048) if n > 272 else (1, 64):
            matrix.multiply(empty(rows, k), empty(matrix.num_sums(rows), dtype=torch.float32))
    for n, k in [(3072, 1024), (12288, 4096), (272, 336)]:
        gated = GatedMatrix(empty(2 * n, k))
        gated.bulk = capability >= 90
        for rows in (1, 24, 64, 128, 256, 512) if n > 272 else (1, 64):
            gated.multiply(empty(rows, k), empty(rows, n))


def quantized(capability: int) -> None:
    """Multiply by matrices of 8 bits."""
    rounded = RoundedRows(512, 4096, torch.device("meta"))
    for n, k in [(4096, 4096), (272, 336)]:
        codes, scales = empty(n, k, dtype=torch.int8), empty(n, dtype=torch.float32)
        matrices: list[SplitMatrix] = [Int8Matrix(codes, scales, rounded)]
        if capability >= 89:
            scales = empty(ceil_div(n, SPAN), ceil_div(k, SPAN), dtype=torch.float32)
            matrices.append(Fp8Matrix(codes.view(torch.float8_e4m3fn), scales, rounded))
        for matrix in matrices:
            matrix.bulk = capability >= 90
            for rows in (1, 128, 512) if n > 272 else (1,):
                matrix.multiply(empty(rows, k), empty(matrix.num_sums(rows), dtype=torch.float32))


def four_bits(capability: int) -> None:
    matrix = Int4Matrix(empty(64, 32, 2, 128, 4, dtype=torch.int32), empty(4096, 32, dtype=torch.float32))
    matrix.bulk = capability >= 90
    for rows in (1, 128):
        matrix.multiply(empty(rows, 4096), empty(matrix.num_sums(rows), dtype=torch.float32))


def step(num_tokens: int, num_rows: int, pages: KVPages) -> DispatchTensors:
    def ids(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    return DispatchTensors(
        token_ids=ids(num_tokens),
        positions=ids(num_tokens),
        slots=ids(num_tokens),
        query_start=ids(num_rows + 1),
        context_lens=ids(num_rows),
        block_tables=ids(num_rows, pages.num_blocks - 1),
        tiles=ids(3, 2),
        num_splits=4,
    )


def pages_of(num_kv_heads: int, head_dim: int, block_size: int) -> KVPages:
    return KVPages(empty(9 * 3 * 2 * num_kv_heads * block_size * head_dim), 9, 3, num_kv_heads, head_dim, block_size)


def row_kernels(_: int) -> None:
    f32, i32 = torch.float32, torch.int32
    for hidden in (896, 4096):
        x, out, weight = empty(7, hidden, dtype=f32), empty(7, hidden), empty(hidden)
        for splits in (0, 1, 4):
            add_norm(x, empty(splits, 7, hidden, dtype=f32), splits, weight, 1e-6, out)
    embed(empty(7, dtype=i32), empty(5, dtype=i32), empty(99, 4096), x)
    gather(out, empty(3, dtype=i32), empty(3, 4096))
    for head_dim, normed in ((64, False), (128, True)):
        pages, width = pages_of(8, head_dim, 32), 32 * head_dim
        table = empty(99, head_dim // 2, dtype=f32)
        norms, bias = (empty(2, head_dim), None) if normed else (None, empty(width))
        for splits in (1, 2):
            sums, q = empty(splits, 7, width, dtype=f32), empty(7, 16, head_dim)
            split_heads(sums, splits, step(7, 3, pages), 2, pages, q, norms, bias, table, table, 1e-6)


def attention_kernels(capability: int) -> None:
    small = capability < 90
    for heads, kv_heads, head_dim in ((32, 8, 128), (14, 2, 64)):
        pages = pages_of(kv_heads, head_dim, 64)
        q, inputs = empty(7, heads, head_dim), step(7, 7, pages)
        partial = empty(attention.num_partial(7, heads, head_dim, 4), dtype=torch.float32)
        for settings in [attention.SMALL_DECODES] if small else [attention.DECODES, attention.FEW_DECODES]:
            attention.attend_decodes(q, inputs, 2, pages, partial, q, settings=settings)
        if not small or head_dim == 128:  # ptxas spills 32 bytes of the smaller one
            chunks = attention.SMALL_CHUNKS if small else attention.CHUNKS
            attention.attend_chunks(q, inputs, 2, pages, q, settings=chunks)


def sampling_kernels(_: int) -> None:
    """Sample from the vocabulary of Qwen3."""
    vocab, limits = 151936, BackendLimits(max_num_seqs=256, max_model_len=40960)
    DeviceSampler(limits, vocab, NoCard(), 1).launch_all(empty(256, vocab, dtype=torch.float32))


CASES: list[Callable[[int], None]] = [products, quantized, four_bits, row_kernels, attention_kernels, sampling_kernels]


def compiled(launch: Launch, capability: int, seen: set[str]) -> dict[str, Any] | None:
    """Compile the kernel of a launch unless that was seen before. Say what it needs."""
    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    names = {name for name in launch.constants if name in kernel.arg_names}
    options = {name: value for name, value in launch.constants.items() if name not in names} | {"debug": False}
    bound, specialization, _ = bind(*launch.arguments, **launch.constants, debug=False)
    packed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    key = str((kernel.__name__, signature, constants, attributes, options))
    if key in seen:
        return None
    seen.add(key)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source = ASTSource(kernel, signature, constants, attributes)
        built = triton.compile(source, target=target, options=packed.__dict__)
    ptx = built.asm["ptx"]
    return {
        "module": kernel.__module__,
        "kernel": kernel.__name__,
        "constants": launch.constants,
        "shared": built.metadata.shared,
        "registers": int(re.findall(r"Used (\d+) registers", log.getvalue())[0]),
        "spills": sum(int(size) for size in re.findall(r"(\d+) bytes spill", log.getvalue())),
        "wgmma": "wgmma" in ptx,
        "bulk": "cp.async.bulk.tensor" in ptx,
        "loads": sorted(loads(ptx)),
        "sums": sorted(layouts_of_sums(built.asm["ttgir"])),
    }


def loads(ptx: str) -> set[int]:
    """Return the sizes of a thread's loads from global memory, in bytes, bulk copies apart."""
    copies = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (0x\w+)", ptx)}
    words = re.findall(r"ld\.global(?:\.[a-z_0-9:]+?)*?(?:\.v(\d))?\.[bufs](\d+) ", ptx)
    return copies | {int(count or 1) * int(bits) // 8 for count, bits in words}


def layouts_of_sums(ttgir: str) -> set[str]:
    """Return how the tensors that are summed, or whose maximum is taken, are spread over threads."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    names = re.findall(r"\"tt\.reduce\".*?\}\) : \(tensor<[^>]*?(#\w+)>", ttgir, re.DOTALL)
    return {layouts[name] for name in names}


SUMS = ("_add_norm", "_split_heads")
"""Kernels whose forms must agree."""


def main(capability: int, first: bool) -> Iterator[dict[str, Any]]:
    launches: list[Any] = []
    with recording(launches.append):
        for case in CASES:
            case(capability)
    launches = [launch for launch in launches if isinstance(launch, Launch)]
    if first:
        once = {launch.kernel.__name__: launch for launch in reversed(launches)}
        launches = [each for each in launches if each.kernel.__name__ in SUMS or each is once[each.kernel.__name__]]
    seen: set[str] = set()
    for launch in launches:
        if result := compiled(launch, capability, seen):
            yield result


if __name__ == "__main__":
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    for line in main(int(sys.argv[1]), "first" in sys.argv):
        print(json.dumps(line), flush=True)
