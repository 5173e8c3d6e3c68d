"""Mend Triton's interpreter, so that kernels compute on a CPU what they compute on a card. Importing this is enough.

Triton 3.6 keeps bfloat16 and float8 as bits. It multiplies those bits, cuts where a card rounds, and lets NaN win in
`tl.maximum`. Its products depend on tiles, and it converts arrays of one element in a way that NumPy 2.4 refuses.
Without TRITON_INTERPRET=1 this module does nothing.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np


def _mend() -> None:
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    handle_of = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    stock_binary, stock_fp_to_fp = builder.binary_op, builder.create_fp_to_fp
    stock_run = interpreter.GridExecutor.__call__
    stock_block_type, stock_broadcast = tl.block_type.__init__, interpreter.TritonSemantic.broadcast_impl_value
    stock_numpy_type, stock_equal = interpreter._get_np_dtype, tl.dtype.__eq__
    stock_patch_lang, stock_patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    float8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    packed = (tl.bfloat16, tl.float8e4nv)
    patched: set[frozenset[str]] = set()
    languages: dict[Any, frozenset[str]] = {}
    block_types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}

    def values(handle: Any) -> Any:
        """Return the numbers of a tensor."""
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        if handle.dtype.scalar == tl.float8e4nv:
            return float8[handle.data]
        return handle.data

    def tensor(numbers: Any, dtype: Any) -> Any:
        """Round numbers to `dtype`, ties to even, as a card does."""
        scalar = dtype.scalar
        if scalar == tl.bfloat16:
            numbers = numbers.astype(np.float32)
            words = numbers.view(np.uint32)
            words = (words + np.uint32(0x7FFF) + ((words >> 16) & 1)) >> 16
            return handle_of(np.where(np.isnan(numbers), 0x7FFF, words).astype(np.uint16), scalar)
        if scalar == tl.float8e4nv:
            clipped = torch.from_numpy(np.clip(numbers.astype(np.float32), -448, 448))
            return handle_of(clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scalar)
        return handle_of(numbers.astype(interpreter._get_np_dtype(scalar)), scalar)

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        return tensor(values(source), dtype)

    def fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            return tensor(values(source), dtype)
        return stock_fp_to_fp(self, source, dtype, rounding)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar not in packed:
            return stock_binary(self, left, right, operation)
        result = operation(values(left), values(right))
        return handle_of(result, tl.int1) if result.dtype == bool else tensor(result, left.dtype)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return tensor(values(x) * values(y) + values(z), z.dtype)

    def dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        """Add exact sums of 16 products one after the other, so that bits do not depend on the shapes of tiles."""
        x, y, out = values(left).astype(np.float64), values(right).astype(np.float64), total.data
        for k in range(0, x.shape[-1], 16):
            out = (out + x[..., k : k + 16] @ y[..., k : k + 16, :]).astype(out.dtype)
        return handle_of(out, total.dtype.scalar)

    def patch_tensor(cls: Any, scope: Any) -> None:
        stock_patch_tensor(cls, scope)
        scope.set_attr(cls, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(
            cls, "__bool__", lambda self: bool(self.handle.data.item()) if self.handle.data.size == 1 else True
        )

    def patch_lang(function: Any) -> Any:
        """Patch the language once and leave it so: to do it in every call takes most of the time."""
        if function not in languages:
            modules = filter(inspect.ismodule, function.__globals__.values())
            languages[function] = frozenset(module.__name__ for module in modules if module in (tl, tl.core))
        names = languages[function]
        if names not in patched:
            stock_patch_lang(function)
            patched.add(names)
        return interpreter._LangPatchScope()

    def init_block_type(self: Any, element: Any, shape: Any) -> None:
        """Describe each shape once: the stock interpreter spends most of its time on these descriptions."""
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element.name, sizes
        if key not in block_types:
            stock_block_type(self, element, shape)
            numbers = tl.tuple([tl.constexpr(size) for size in sizes])
            self.shape, self.of_tensors = shapes.setdefault(sizes, (self.shape, numbers))
            block_types[key] = self.__dict__
        self.__dict__ = block_types[key]

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = (kind.of_tensors, tl.constexpr(kind.numel)) if kind.is_block() else scalar

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return stock_broadcast(self, left, right)

    def numpy_type(dtype: Any) -> Any:
        if (name := dtype.scalar.name) not in numpy_types:
            numpy_types[name] = stock_numpy_type(dtype)
        return numpy_types[name]

    def run(self: Any, *arguments: Any, **constants: Any) -> None:
        with np.errstate(all="ignore"):
            stock_run(self, *arguments, **constants)

    builder.cast_impl = cast
    builder.create_fp_to_fp = fp_to_fp
    builder.binary_op = binary
    builder.create_fma = fma
    builder.create_dot = dot
    builder.get_bf16 = lambda self, value: tensor(np.array([value], np.float32), tl.bfloat16)
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)  # as on a card
    scalar = tl.tuple([]), tl.constexpr(1)
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or stock_equal(self, other)
    interpreter.TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = run
    # Tensors of the CPU are not copied for the kernel, so there is nothing to copy back.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend()
