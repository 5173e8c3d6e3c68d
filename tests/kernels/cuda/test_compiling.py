"""Every CUDA kernel compiles without a card, keeps its values in registers and fits shared memory."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = {90: 227 << 10, 80: 163 << 10}
FORMS = [
    *itertools.product(SHARED, ["first"]),
    *(pytest.param((each, "all"), marks=pytest.mark.soak) for each in SHARED),
]
"""Capabilities, and which forms of each kernel are compiled."""


@pytest.fixture(scope="module", params=FORMS, ids=str)
def forms(request: pytest.FixtureRequest) -> tuple[int, str]:
    capability, which = request.param
    return capability, which


@pytest.fixture(scope="module")
def capability(forms: tuple[int, str]) -> int:
    return forms[0]


@pytest.fixture(scope="module")
def kernels(forms: tuple[int, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What compiling.py says of each kernel. Triton's interpreter, which tests turn on, compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.cuda.compiling", *map(str, forms)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_spills(kernels: list[dict[str, Any]]) -> None:
    """But for a few bytes of chunks, which were faster so than with a stage more."""
    allowed = {"_chunk": 32}
    assert [kernel for kernel in kernels if kernel["spills"] > allowed.get(kernel["kernel"], 0)] == []


def test_kernels_fit_shared_memory(kernels: list[dict[str, Any]], capability: int) -> None:
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED[capability]] == []


def test_products_use_the_instructions_of_the_card(kernels: list[dict[str, Any]], capability: int) -> None:
    products = [kernel for kernel in kernels if kernel["kernel"].endswith(("few_rows", "many_rows"))]
    assert all(kernel["wgmma"] == (capability >= 90) for kernel in products)
    assert any(kernel["bulk"] for kernel in products) == (capability >= 90)
    assert all(kernel["bulk"] or max(kernel["loads"]) == 16 for kernel in products)
    plain = [kernel for kernel in products if kernel["module"].endswith(".products")]
    assert all(kernel["bulk"] or kernel["loads"] == [16] for kernel in plain)


def test_attention_uses_the_instructions_of_the_card(kernels: list[dict[str, Any]], capability: int) -> None:
    attention = [kernel for kernel in kernels if kernel["module"].endswith(".attention")]
    readers = [kernel for kernel in attention if kernel["kernel"] != "_merge_splits"]
    assert all(kernel["loads"] == [4, 16] for kernel in readers)  # block tables; queries, keys and values
    chunks = [kernel for kernel in attention if kernel["kernel"] == "_chunk"]
    assert all(kernel["wgmma"] == kernel["bulk"] == (capability >= 90) for kernel in chunks)


def test_sums_of_rows_do_not_depend_on_splits(kernels: list[dict[str, Any]]) -> None:
    """The order of a sum follows the layout of its tensor, which the compiler chooses."""
    layouts: dict[str, set[str]] = {}
    for kernel in kernels:
        if kernel["kernel"] in ("_add_norm", "_split_heads"):
            shape = {name: value for name, value in kernel["constants"].items() if name != "SPLITS"}
            layouts.setdefault(str((kernel["kernel"], shape)), set()).add(str(kernel["sums"]))
    assert len(layouts) == 4
    assert [shape for shape, found in layouts.items() if len(found) > 1] == []
