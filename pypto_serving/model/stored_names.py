"""Names of tensors as other programs write them, and tensors that hold several matrices. Torch-free.

A decoder's tensors are called `model.layers.0...`, `model.embed_tokens...` and `lm_head...` here. Models with further
parts, wrappers of trainers and bare decoders put other words in front of them, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

PREFIX = "model."
_FIRST_LAYER = re.compile(r"(.*?)layers\.0\.(?:self_attn|linear_attn|input_layernorm)\.")
_HEAD = re.compile(r"(?:.*\.)?(lm_head\.[^.]+)")
EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(\.weight)?")
"""A tensor of all experts of a layer: gate and up of each one after the other, or its down."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision\w*|audio\w*|embed_vision|embed_audio|multi_modal_\w+|multimodal_\w+|mm_\w+|mtp|"
    r"connector|image_newline|talker|token2wav|code2wav)\..*"
)
"""Parts of a model that do not make text out of text: encoders of images and sounds, and draft layers."""
_MODULE = re.compile(r"(?:\w+\.)*?(?:(lm_head)$|(?=layers\.[0-9]+\.|embed_tokens$))")
_MIXTRAL = "block_sparse_moe"
_RELEASED = {_MIXTRAL: "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Words in the names of Mixtral's experts, and those of other families."""
_WRAPPER = "language_model"


def own_module(name: str) -> str:
    """Return the name here of a module of the decoder, however it is wrapped; other names stay."""
    found = None if OTHER_PARTS.fullmatch(name) else _MODULE.match(name)
    if found is not None:
        name = found[1] or PREFIX + name[found.end() :]
    return _reworded(name, _RELEASED) if _MIXTRAL in name else name


def released_name(name: str) -> str:
    """Return the name in Mixtral's releases."""
    return _reworded(name, {own: released for released, own in _RELEASED.items()})


def _reworded(name: str, words: Mapping[str, str]) -> str:
    return ".".join(words.get(word, word) for word in name.split("."))


def spelled_for(pattern: str, module: str) -> tuple[str, ...]:
    """Return the names of a module here that `pattern` may mean: with the wrappers and words that it has itself."""
    if _MIXTRAL in pattern or re.search(r"\bw[123\[]", pattern):
        module = released_name(module)
    bare = module.removeprefix(PREFIX)
    if _WRAPPER in pattern:
        return f"{PREFIX}{_WRAPPER}.{bare}", f"{_WRAPPER}.{module}", f"{_WRAPPER}.{bare}"
    return (module,) if "model" in pattern else (module, bare)


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
    if not name.startswith(prefix) or OTHER_PARTS.fullmatch(name):
        return name
    own = PREFIX + name.removeprefix(prefix)
    return _reworded(own, _RELEASED) if _MIXTRAL in own else own


def names_in_index(names: Collection[str], stored: Collection[str]) -> set[str]:
    """Return the names here of the tensors in an index; those that are `stored` tell what fused ones hold."""
    own = set(own_names(names).values())
    fused = {name: match[1] for name in own if name not in stored and (match := EXPERTS.fullmatch(name))}
    return own.difference(fused).union(name for name in stored if name.startswith(tuple(fused.values())))
