"""What quantized weights may not be is refused when they are packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pypto_serving.kernels import Engine, pack_quantized, packed_form
from pypto_serving.types.weights import CodesForm, Fp8Form, Layout, Table
from tests.kernels.quantized import FORMS, Quantized, random_codes, random_fp8, room

pytestmark = pytest.mark.thinned(2)

INT4, E2M1 = CodesForm(Table.INT4, 128, "F16", zeros=True), CodesForm(Table.E2M1, 32, "F8_E8M0")


def pack(engine: Engine, weights: Quantized, **changes: Any) -> None:
    n, k = weights.values.shape
    pack_quantized(engine, room(weights.form, n, k), replace(weights.stored, **changes), n)


def test_not_a_number_is_refused(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    for code in (0x7F, 0xFF):
        weights = random_fp8(rng, 40, 64, Fp8Form((128, 128)))
        weights.stored.weights[33, 63] = code
        with pytest.raises(ValueError, match="a weight of output 33 is not a number"):
            pack(engine, weights)
    for form, bad in [(E2M1, 255), (INT4, np.inf), (FORMS[0], 0x7F80), (FORMS[1], np.nan)]:
        weights = random_codes(rng, 40, 64, form)
        weights.stored.scales[3, -1] = bad
        with pytest.raises(ValueError, match="a scale is not finite"):
            pack(engine, weights)
    fp8 = random_fp8(rng, 40, 64, Fp8Form((16, 64)))
    with pytest.raises(ValueError, match="a scale is not finite"):
        pack(engine, fp8, scales=np.full((3, 1), np.nan, np.float32))
    with pytest.raises(ValueError, match="factor"):
        pack(engine, random_codes(rng, 16, 32, E2M1), factor=float("inf"))


@pytest.mark.parametrize("value", [-9, 8, 127, -128])
def test_bytes_that_are_no_codes_are_refused(engine: Engine, value: int) -> None:
    weights = random_codes(np.random.default_rng(0), 40, 64, FORMS[0], Layout.BYTES)
    weights.stored.codes[39, 17] = value
    with pytest.raises(ValueError, match=r"a weight of output 39 is not in \[-8, 7\]"):
        pack(engine, weights)


def test_zero_points_and_scales_of_another_kind_are_refused(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    weights, plain = random_codes(rng, 40, 256, INT4), random_codes(rng, 40, 256, FORMS[2])
    zeros, scales = weights.stored.zeros, weights.stored.scales
    assert zeros is not None
    for changes, message in [
        ({"zeros": None}, "missing"),
        ({"zeros": zeros[:, :1]}, "uint8"),
        ({"zeros": zeros.astype(np.int32)}, "uint8"),
        ({"zeros": zeros + np.uint8(17)}, "more than 16"),
        ({"scales": scales[:, :1]}, "scales must be F16"),
        ({"scales": scales.astype(np.float32)}, "scales must be F16"),
        ({"codes": weights.stored.codes[:, 1:]}, "bytes are no"),
        ({"codes": weights.stored.codes.tobytes() and weights.stored.codes[:39]}, "bytes are no"),
    ]:
        with pytest.raises(ValueError, match=message):
            pack(engine, weights, **changes)
    with pytest.raises(ValueError, match="belong to no such form"):
        pack(engine, plain, zeros=zeros)
    fp8 = random_fp8(rng, 40, 64, Fp8Form((16, 64)))
    for changes in ({"scales": np.ones((2, 1), np.float32)}, {"scales": np.ones((3, 1))}):
        with pytest.raises(ValueError, match="scales must be float32"):
            pack(engine, fp8, **changes)


def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    weights = random_codes(rng, 33, 64, INT4)
    out = room(weights.form, 64, 64)
    for offset, half in [(8, None), (-16, None), (32, None), (0, 0), (0, 2)]:
        with pytest.raises(ValueError, match=r"\[33, 64\]"):
            pack_quantized(engine, out, weights.stored, 33, offset, half)
    with pytest.raises(ValueError, match="does not go among weights"):
        pack_quantized(engine, out, random_codes(rng, 32, 64, E2M1).stored, 32)
    for layout in (Layout.GPTQ, Layout.AWQ):
        with pytest.raises(ValueError, match="multiple of 8"):
            pack_quantized(engine, out, replace(weights.stored, layout=layout), 33)


@pytest.mark.parametrize(
    ("form", "k"),
    [
        (CodesForm(Table.INT4, 16, "BF16"), 64),
        (CodesForm(Table.INT4, 48, "BF16"), 96),
        (CodesForm(Table.INT4, 192, "BF16"), 384),
        (CodesForm(Table.INT4, 32, "F64"), 64),
        (CodesForm(Table.E2M1, 8, "BF16"), 64),
        (CodesForm(Table.E2M1, 32, "BF16", zeros=True), 64),
        (CodesForm(Table.INT4, 128, "BF16"), 40),
        (Fp8Form((128, 2)), 64),
        (Fp8Form((128, 128)), 66),
    ],
)
def test_forms_without_a_kernel_are_refused(form: CodesForm | Fp8Form, k: int) -> None:
    with pytest.raises(ValueError, match=r"not supported|supported|must be"):
        packed_form(form, 64, k)
