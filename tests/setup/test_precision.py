"""Options that round more than the weights, where the model leaves a choice."""

from __future__ import annotations

import pytest

from pypto_serving.errors import ConfigError
from tests.setup.small import WITH_KERNELS, make_model, make_resolved, setting

CODES = make_model(choices=("activations",), quantization="int4 g32", needs_torch="")


def test_activations_of_gguf_are_exact_unless_asked_for_in_int8() -> None:
    model = make_model(choices=("activations",), blocks="Q4_K + Q6_K", needs_torch="")
    for given, value in ((None, "bf16"), ("auto", "bf16"), ("int8", "int8")):
        assert make_resolved(model, WITH_KERNELS, activations=given).engine.model.activations == value


def test_activations_of_codes_are_int8_unless_asked_for_in_bf16() -> None:
    for given, value, reason in (
        (None, "int8", "default for 4-bit weights"),
        ("auto", "int8", "default for 4-bit weights"),
        ("int8", "int8", "given by --activations"),
        ("bf16", "bf16", "given by --activations"),
    ):
        resolved = make_resolved(CODES, WITH_KERNELS, activations=given)
        assert resolved.engine.model.activations == value
        assert setting(resolved, "activations") == (value, reason)


def test_what_the_model_does_not_leave_open_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--activations is bf16, but only 4-bit weights and GGUF leave a choice; "):
        make_resolved(activations="bf16")
    reason = "only 4-bit weights and GGUF leave a choice"
    assert setting(make_resolved(activations="auto"), "activations") == ("auto", reason)


def test_an_output_layer_is_rounded_only_by_the_kernels() -> None:
    model = make_model(choices=("head",), needs_torch="")
    rounded = make_resolved(model, WITH_KERNELS, head="int8")
    assert (rounded.engine.model.head, setting(rounded, "head")) == ("int8", ("int8", "given by --head"))
    assert setting(make_resolved(model, WITH_KERNELS), "head") == ("auto", "default: as it is stored")
    with pytest.raises(ConfigError, match=r"^--head is int8, but torch computes, and rounds nothing to int8; drop it$"):
        make_resolved(model, WITH_KERNELS, head="int8", kernels="torch")
    with pytest.raises(ConfigError, match=r"^--head is int8, but this model has no output layer of bf16"):
        make_resolved(CODES, WITH_KERNELS, head="int8")


def test_keys_and_values_are_kept_as_computed_or_in_int8() -> None:
    model = make_model(choices=("kv_dtype",), needs_torch="")
    for given, value, reason in (
        (None, "bf16", "default: as the model computes"),
        ("auto", "bf16", "default: as the model computes"),
        ("bf16", "bf16", "given by --kv-dtype"),
        ("int8", "int8", "given by --kv-dtype"),
    ):
        assert setting(make_resolved(model, WITH_KERNELS, kv_dtype=given), "kv-dtype") == (value, reason)
    assert setting(make_resolved(kv_dtype="bf16"), "kv-dtype") == ("bf16", "given by --kv-dtype")
    for refused, options, message in (
        (make_model(), {"kv_dtype": "int8"}, "int8, but the KV cache of this model has a form of its own; drop it"),
        (model, {"kv_dtype": "int8", "kernels": "torch"}, "int8, but torch computes, and rounds nothing to int8"),
        (make_model(dtype="float32"), {"kv_dtype": "bf16"}, "bf16, but the model computes in float32, and keeps that"),
    ):
        with pytest.raises(ConfigError, match=f"^--kv-dtype is {message}"):
            make_resolved(refused, WITH_KERNELS, **options)
