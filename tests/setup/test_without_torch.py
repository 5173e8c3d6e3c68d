"""Without torch, what the kernels cannot serve is refused by one line that says which command helps."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest

from pypto_serving.cli import main
from pypto_serving.errors import ConfigError
from tests.setup.small import WITH_KERNELS, make_model, make_resolved

INSTALL = "run in the checkout: pip install '.[torch]'"
KERNELS_ONLY = msgspec.structs.replace(WITH_KERNELS, torch=False)
NOTHING = msgspec.structs.replace(KERNELS_ONLY, kernels=())
FLOAT32 = {"dtype": "float32", "needs_torch": "the kernels serve bfloat16 only, not float32"}
NO_TORCH = ", which needs torch, and torch is not installed; give "
ODD = {"needs_torch": "the kernels need an even hidden_size"}


def test_the_kernels_need_no_torch() -> None:
    model = make_model(needs_torch="", packed_bytes=10**6)
    assert make_resolved(model, KERNELS_ONLY).engine.worker.kernels == "avx2"
    assert make_resolved(model, NOTHING, backend="null").engine.worker.kernels == ""


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ({}, {"kernels": "torch"}, "--kernels is torch, but torch is not installed; drop it, or "),
        (ODD, {"kernels": "torch"}, "--kernels is torch, but torch is not installed; "),
        (FLOAT32, {}, f"the weights are float32{NO_TORCH}--dtype bfloat16, or "),
        (FLOAT32, {"dtype": "auto"}, f"the weights are float32{NO_TORCH}--dtype bfloat16, or "),
        (FLOAT32, {"dtype": "float32"}, f"--dtype is float32{NO_TORCH}bfloat16, or "),
        (ODD, {}, "the kernels need an even hidden_size, and torch is not installed; change that, or "),
    ],
)
def test_what_helps(model: dict[str, Any], options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_resolved(make_model(**({"needs_torch": ""} | model)), KERNELS_ONLY, **options)
    assert str(error.value) == line + INSTALL
    assert make_resolved(make_model(**({"needs_torch": ""} | model)), WITH_KERNELS, **options)


@pytest.mark.parametrize("model", [{"needs_torch": ""}, FLOAT32, ODD])
@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"kernels": "auto"}])
def test_neither_kernels_nor_torch(model: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"nor torch; install .* or run in the checkout: pip install"):
        make_resolved(make_model(**model), NOTHING, **options)


def test_a_build_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pypto_serving.setup.host.runnable", lambda: ())
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["obstacle"] in err and len(err.splitlines()) == 1


def test_installed_is_what_can_be_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line asks the import system, in `check` as in `serve`, and imports nothing for it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", "--dtype", "float32"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.strip().endswith(INSTALL) and len(err.splitlines()) == 1
