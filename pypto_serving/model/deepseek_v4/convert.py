"""Plan the conversion of a DeepSeek V4 checkpoint to the W8A8 form that pypto-lib serves. Torch-free.

Large matrices and experts become int8, latent matrices bfloat16; other tensors, and draft layers, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.convert.conversion import Plan, Weight
from pypto_serving.model.convert.rounding import Encoding, section, w8a8
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.formats.quantization import SECTION

_ENCODED = ("linear", "expert")
_IGNORED = ["head", r"re:.*\.(wq_a|wkv|wo_a|wgate|weights_proj|gate)$"]


def plan_conversion(model: DeepseekV4Config, headers: Mapping[str, StoredTensor], encoding: Encoding) -> Plan:
    """Plan the conversion of a checkpoint with these headers. Raises ModelError for formats other than W8A8."""
    if encoding.name != "w8a8":
        raise ModelError(f"DeepSeek V4 is converted to w8a8 only, not to {encoding.name}")
    encoding = w8a8("scale")
    inventory, drafts = DeepseekV4Inventory(model, headers), any(name.startswith("mtp.") for name in headers)
    weights = {}
    for name, tensor in (inventory.model | inventory.drafts if drafts else inventory.model).items():
        scheme, encoded = inventory.scheme(name), encoding if tensor.role in _ENCODED else None
        weights[name] = Weight(name, tensor.shape, scheme, encoded, "BF16" if tensor.role == "latent" else "")
    config = {SECTION: section(encoding, _IGNORED), "expert_dtype": None}
    return Plan(weights=weights, expected=inventory.expected(drafts), ignores=inventory.ignores, config=config)
