"""What a folder is that holds no checkpoint in the form that is served, and what helps. Torch-free."""

from __future__ import annotations

from pathlib import Path

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
