"""A tiny checkpoint folder: byte-level BPE, ChatML template, sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = "the quick brown fox jumps over the lazy dog, hello world: 中文 and ünïcödé 😀 once more"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if shout %}LOUD{% endif %}"
)
DEEPSEEK_V4_TOKENS = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"]
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def tiny_tokenizer(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """Byte-level BPE that knows every byte and some merges."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    raw.train_from_iterator([TEXT] * 20, trainer)
    return raw


def write_checkpoint(folder: Path, *, tokenizer: bool = True, template: str | None = CHATML) -> Path:
    """Fill `folder`; returns it."""
    config: dict[str, object] = {"eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    if tokenizer:
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": [0, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_deepseek_v4(folder: Path) -> Path:
    """A checkpoint folder with DeepSeek V4's tokens, and a template that must not be used; returns it."""
    raw = tiny_tokenizer()
    raw.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"])
    raw.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in DEEPSEEK_V4_TOKENS])
    write_checkpoint(folder, tokenizer=False)
    raw.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<｜end▁of▁sentence｜>", "add_bos_token": False, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    return folder
