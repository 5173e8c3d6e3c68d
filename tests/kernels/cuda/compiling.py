"""Compile CUDA kernels for cards that are not there, as the launches of a real model would have them compiled.

The wrappers of kernels run on meta tensors, and their launches are recorded. Triton's interpreter must be off:
`python -m tests.kernels.cuda.compiling 90` prints one line of JSON a kernel. To add kernels, write a function that
calls their wrappers for a compute capability and put it in CASES.
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

from pypto_serving.kernels.cuda.launch import Launch, recording
from pypto_serving.kernels.cuda.products import Bf16Matrix, GatedMatrix


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def products(capability: int) -> None:
    """Multiply by the matrices of Qwen3 0.6B and 8B, and by one that fits no tile."""
    shapes = [(4096, 1024), (1024, 2048), (1024, 3072), (151936, 1024)]  # queries, keys and values; out; down; head
    shapes += [(6144, 4096), (4096, 4096), (4096, 12288), (151936, 4096), (272, 336)]
    for n, k in shapes:
        matrix = Bf16Matrix(empty(n, k))
        matrix.bulk = capability >= 90
        for rows in (1, 24, 64, 128, 256, 512, 2048):
            matrix.multiply(empty(rows, k), empty(matrix.num_sums(rows), dtype=torch.float32))
    for n, k in [(3072, 1024), (12288, 4096), (272, 336)]:
        gated = GatedMatrix(empty(2 * n, k))
        gated.bulk = capability >= 90
        for rows in (1, 24, 64, 128, 256, 512):
            gated.multiply(empty(rows, k), empty(rows, n))


CASES: list[Callable[[int], None]] = [products]


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
    }


def loads(ptx: str) -> set[int]:
    """Return the sizes of a thread's loads from global memory, in bytes, bulk copies apart."""
    copies = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (0x\w+)", ptx)}
    words = re.findall(r"ld\.global(?:\.[a-z_0-9:]+?)*?(?:\.v(\d))?\.[bufs](\d+) ", ptx)
    return copies | {int(count or 1) * int(bits) // 8 for count, bits in words}


def main(capability: int) -> Iterator[dict[str, Any]]:
    launches: list[Any] = []
    with recording(launches.append):
        for case in CASES:
            case(capability)
    seen: set[str] = set()
    for launch in launches:
        if isinstance(launch, Launch) and (result := compiled(launch, capability, seen)):
            yield result


if __name__ == "__main__":
    triton.knobs.nvidia.dump_ptxas_log = True
    for line in main(int(sys.argv[1])):
        print(json.dumps(line), flush=True)
