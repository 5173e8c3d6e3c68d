"""Saving the model in the Hugging Face layout, loading it again, and chatting with it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from .tokenizer import END, Encoder

SAMPLE_CHATS = [
    ["Hi!", "Who are you?", "What can you do?", "Thanks!", "Bye"],
    ["What is 1+1?", "And 5+6?", "Add 7 to that.", "Are you sure?", "what's 12 minus 30"],
    ["My name is Ada.", "How much is 40 plus 2?", "Count from 3 to 9.", "What is my name?"],
    ["Spell 'apple' backwards.", "Repeat that.", "What comes after Monday?", "Say hello world"],
    ["What is the capital of Peru?", "Write me a poem about rust", "What is 1234 * 99?", "asdf qwer"],
    ["10-1", "What is -5+3?", "spell 'Hello'", "Count from 9 to 2"],
    ["¿Cuál es la capital de España?", "def f(x): return x + 1", "What is my name?", "Count down from 10."],
]

LONGEST_REPLY = 512
"""Tokens, more than any right reply has."""


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16 and the configuration with the keys of the released models."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")  # tied to the embedding
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    source = model.config
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": source.eos_token_id,
        "head_dim": source.head_dim,
        "hidden_act": source.hidden_act,
        "hidden_size": source.hidden_size,
        "initializer_range": source.initializer_range,
        "intermediate_size": source.intermediate_size,
        "max_position_embeddings": source.max_position_embeddings,
        "max_window_layers": source.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": source.num_attention_heads,
        "num_hidden_layers": source.num_hidden_layers,
        "num_key_value_heads": source.num_key_value_heads,
        "pad_token_id": source.pad_token_id,
        "rms_norm_eps": source.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": source.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": source.vocab_size,
    }
    generation = {
        "do_sample": False,
        "eos_token_id": source.eos_token_id,
        "max_new_tokens": LONGEST_REPLY,
        "pad_token_id": source.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """Load a saved model, to compute in float32 on its bfloat16 weights, and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def transcript(
    model: Qwen3ForCausalLM, encoder: Encoder, questions: list[str], tokens: int = 300
) -> list[tuple[str, str]]:
    """Ask questions one after the other; return them with the greedy replies."""
    end = encoder.tokenizer.token_to_id(END)
    ids: list[int] = []
    turns = []
    for question in questions:
        ids += encoder.prompt(question)
        prompt = torch.tensor([ids])
        made = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=end,
        )[0, len(ids) :].tolist()
        text = made[:-1] if made[-1] == end else made
        turns.append((question, encoder.tokenizer.decode(text, skip_special_tokens=False)))
        ids += [*text, end, *encoder.tokenizer.encode("\n").ids]
    return turns


def transcripts(model: Qwen3ForCausalLM, encoder: Encoder) -> list[str]:
    """Return the sample chats as text."""
    chats = (transcript(model, encoder, questions) for questions in SAMPLE_CHATS)
    return ["\n".join(f"> {question}\n{answer}" for question, answer in chat) for chat in chats]
