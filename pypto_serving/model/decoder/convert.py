"""Plan the conversion of a decoder's weights. Torch-free.

All linear layers except routers are encoded; the rest becomes bfloat16. W8A8 also encodes the output layer; a tied one
becomes a separate tensor. With 4 bits, the output layer stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.convert.conversion import Plan, Weight
from pypto_serving.model.convert.rounding import Encoding, section
from pypto_serving.model.decoder.inventory import EMBEDDING, DecoderInventory
from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.model.formats.quantization import SECTION
from pypto_serving.model.formats.schemes import PLAIN
from pypto_serving.model.stored_names import released_name

_HEAD = "lm_head"


def plan_conversion(model: DecoderConfig, headers: Mapping[str, StoredTensor], encoding: Encoding) -> Plan:
    """Plan the conversion of a checkpoint with these headers.

    int8 includes the output layer, a quarter of the bytes of a 0.6B model; a tied one becomes a separate tensor, since
    embeddings are looked up, not multiplied. With 4 bits it stays, since its errors would reach the logits undamped.
    """
    inventory, whole = DecoderInventory(model, headers), encoding.name == "w8a8"
    router = f".{model.names.router}"
    shapes, weights = inventory.weights(), {}
    sources = {name: name for name in shapes}
    if whole and model.tied_embeddings:
        sources[f"{_HEAD}.weight"] = EMBEDDING
    for name, source in sources.items():
        module = name.removesuffix(".weight")
        linear = (module in inventory.schemes or module == _HEAD) and not module.endswith(router)
        encoded = linear and (whole or module != _HEAD)
        scheme = inventory.schemes.get(source.removesuffix(".weight"), PLAIN)
        target = released_name(name) if model.names.mixtral and ".mlp." in name else name
        weights[target] = Weight(source, shapes[source], scheme, encoding if encoded else None, "BF16")
    if model.names.mixtral:
        router = released_name(router)
    ignore = ([] if whole else [_HEAD]) + ([f"re:.*{re.escape(router)}$"] if model.experts else [])
    config: dict[str, Any] = {SECTION: section(encoding, ignore)}
    if whole:
        config["tie_word_embeddings"] = False
    return Plan(weights=weights, expected=inventory.expected(), ignores=inventory.ignores, config=config)
