"""What loading takes beside the weights that stay: about a layer's, however many layers there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.kernels import runnable
from pypto_serving.model.registry import Serving, load_spec
from tests.deepseek_v4 import HEAVY, SLIDING, SPARSE
from tests.model.conftest import MakeCheckpoint

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 12
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v4_fast": {
        "layer_types": [SLIDING, SPARSE, HEAVY] * (LAYERS // 3),
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 24,
        "o_lora_rank": 32,
    },
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 24, "mlp_only_layers": []},
    "qwen3": {"hidden_size": 512, "intermediate_size": 3072},
}
CODE_BYTES = 20 << 20
"""Pages of libraries that loading is the first to touch, and code that oneDNN makes."""


@pytest.mark.thinned(1)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kernels", [*runnable()[:1], pytest.param("torch", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", list(SIZES))
def test_loading_takes_a_layer_beside_the_weights(checkpoint: MakeCheckpoint, kind: str, kernels: str) -> None:
    path = checkpoint(kind, dtype="bfloat16", num_hidden_layers=LAYERS, **SIZES[kind])
    dtype = "float32" if kernels == "torch" else "bfloat16"
    command = [sys.executable, "-m", "tests.model.loading", str(path), dtype, kernels]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found, spec = json.loads(done.stdout.splitlines()[-1]), load_spec(path, Serving(dtype))
    weights = spec.weight_bytes if kernels == "torch" else spec.packed_bytes
    beside = found["most"] - found["before"] - weights
    assert weights > 4 * CODE_BYTES, "too small to tell"
    assert beside < weights / LAYERS + CODE_BYTES, found
    assert found["reports"] > 2 * LAYERS
