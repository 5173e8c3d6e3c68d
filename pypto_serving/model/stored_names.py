"""Names of tensors as other programs write them, and tensors that hold several matrices. Torch-free.

A decoder's tensors are called `model.layers.0...`, `model.embed_tokens...` and `lm_head...` here. Models with further
parts, wrappers of trainers and bare decoders put other words in front of them, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection

PREFIX = "model."
_FIRST_LAYER = re.compile(r"(.*?)layers\.0\.(?:self_attn|linear_attn|input_layernorm)\.")
_HEAD = re.compile(r"(?:.*\.)?(lm_head\.[^.]+)")
EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")
"""A tensor of all experts of a layer: gate and up of each one after the other, or its down."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision\w*|audio\w*|embed_vision|embed_audio|multi_modal_\w+|multimodal_\w+|mm_\w+|mtp|"
    r"connector|image_newline|talker|token2wav|code2wav)\..*"
)
"""Parts of a model that do not make text out of text: encoders of images and sounds, and draft layers."""


def own_names(names: Collection[str]) -> dict[str, str]:
    """Return the name here of each tensor; parts beside the decoder keep theirs, and so does all that is not clear."""
    found = {match[1] for name in names if (match := _FIRST_LAYER.match(name))}
    decoders = [prefix for prefix in found if f"{prefix}embed_tokens.weight" in names]
    decoders = decoders or [prefix for prefix in found if f"{prefix}norm.weight" in names]
    if len(decoders) != 1:
        return {name: name for name in names}
    own = {name: _own(name, decoders[0]) for name in names}
    if TABLE not in own.values():  # of a tied pair, some programs keep the other
        own = {name: TABLE if renamed == HEAD else renamed for name, renamed in own.items()}
    return own


def _own(name: str, prefix: str) -> str:
    if head := _HEAD.fullmatch(name):
        return head[1]
    return PREFIX + name.removeprefix(prefix) if name.startswith(prefix) and not OTHER_PARTS.fullmatch(name) else name


def names_in_index(names: Collection[str], stored: Collection[str]) -> set[str]:
    """Return the names here of the tensors in an index; those that are `stored` tell what fused ones hold."""
    own = set(own_names(names).values())
    fused = {name: match[1] for name in own if name not in stored and (match := EXPERTS.fullmatch(name))}
    return own.difference(fused).union(name for name in stored if name.startswith(tuple(fused.values())))
