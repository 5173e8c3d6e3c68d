"""What a folder is that holds no checkpoint in the form that is served, and what helps. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from pypto_serving.util import parse_json, read_regular

_ADAPTER, _CONFIG = "adapter_config.json", "config.json"
_FORMS = (
    ("mmproj*.gguf", "it holds a vision encoder of GGUF; give the file of the language model"),
    ("*.gguf", "it holds GGUF files; give the path of one"),
    ("pytorch_model*.bin", "its weights are pickled ({}); save_pretrained of transformers writes safetensors"),
    ("*.pt", "its weights are pickled ({}); save_pretrained of transformers writes safetensors"),
    ("*.pth", "its weights are pickled ({}); save_pretrained of transformers writes safetensors"),
    ("consolidated*.safetensors", "it has the form of Mistral's own tools ({}); give the one of Hugging Face"),
    ("params.json", "it has the form of Mistral's own tools ({}); give the one of Hugging Face"),
    ("model_index.json", "it is a pipeline of diffusers, which makes no text"),
    ("*.onnx", "its weights are in {}; give the checkpoint of safetensors that it was made from"),
    ("*.h5", "its weights are in {}; give the checkpoint of safetensors"),
    ("*.msgpack", "its weights are in {}; give the checkpoint of safetensors"),
    ("*/config.json", "give the folder {} in it"),
    ("snapshots/*/config.json", "give the folder {} in it"),
)
_POOLING = ("1_Pooling", "modules.json")
"""What sentence-transformers writes beside a model whose outputs are pooled to a vector."""
_KINDS = (
    (r"For(Sequence|Token)Classification|ForReward|RewardModel|Rerank", "a classifier, reranker or reward model"),
    (r"(?i:bert|electra|mpnet)|ForMaskedLM|ForQuestionAnswering|ForMultipleChoice", "an encoder"),
    (r"Whisper|Wav2Vec|Hubert|ForSpeech|ForCTC|ForAudio|ForTextTo|TTS", "a model of sounds"),
    (r"CLIP|Siglip|ViT|Dinov|UNet|Transformer2D|AutoencoderKL|ForImage|ForObject|ForDepth", "a model of images"),
    (r"ForConditionalGeneration|ForVision2Seq|VL|Vision|Llava", "a model of more than text"),
    (r"(?<!LMHead)Model$", "a model without an output layer, such as one of embeddings"),
)
"""Kinds of models that do not make text out of text, by parts of the names of their architectures."""
_INPUTS = {"vision_config": "images", "audio_config": "sounds", "thinker_config": "images and sounds"}


def other_kind(
    folder: Path, raw: Mapping[str, Any], name: str, served: Container[str], of_text: str
) -> tuple[str, str]:
    """Return what a checkpoint of the architecture `name` is instead of a model that makes text, and what may help.

    The first is "" if it may be one.

    `raw`: its config.json. `of_text`: the architecture of a model of text with these values, "" if none is served.
    """
    if any((folder / name).exists() for name in _POOLING):
        return "an embedding model (it has the files of sentence-transformers)", ""
    if name in served:
        return "", ""
    if inputs := " and ".join(says for key, says in _INPUTS.items() if raw.get(key)):
        hint = f"""; hf-overrides '{{"architectures": ["{of_text}"]}}' serves its part for text alone"""
        return f"a model of text with {inputs}", hint if of_text else ""
    if raw.get("is_encoder_decoder"):
        return "an encoder-decoder model", ""
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name)), ""), ""


def what_it_is(folder: Path) -> str:
    """Return what `folder` holds instead of a whole checkpoint, and what helps; "" if nothing tells."""
    try:
        if not folder.is_dir():
            return ""
        if not any(folder.iterdir()):
            return "it is empty"
        if (folder / _ADAPTER).is_file():
            return f"it holds an adapter (LoRA){_base(folder)}; merge it into that model and give the result"
        for pattern, says in _FORMS:
            found = sorted(folder.glob(pattern))
            # a vision encoder lies beside its language model, and a checkpoint may have others in it
            beside = pattern.startswith("mmproj") and len(found) < len([*folder.glob("*.gguf")])
            inside = pattern.endswith(_CONFIG) and (folder / _CONFIG).exists()
            if found and not beside and not inside:
                shown = found[0].parent if found[0].name == _CONFIG else found[0]
                return says.format(shown.relative_to(folder))
    except OSError:
        pass
    return ""


def _base(folder: Path) -> str:
    try:
        content = parse_json(read_regular(folder / _ADAPTER))
    except (OSError, ValueError):
        return ""
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    return f" of {base}" if isinstance(base, str) and base.isprintable() and len(base) < 200 else ""
