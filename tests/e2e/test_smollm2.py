"""A real model: SmolLM2-135M-Instruct from its GGUF file, against transformers in float32 on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from pypto_serving import LLM, SamplingParams
from pypto_serving.errors import ModelError
from pypto_serving.setup.locate import locate_model

pytestmark = [pytest.mark.e2e, pytest.mark.golden]

TIE = 0.1
"""Two logits of the reference that bfloat16 may exchange."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "17 + 25 =",
    "Water boils at",
    "  Two spaces   and more",
    "Die Katze sitzt auf",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 4,",
    "Q: What do bees make?\nA:",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    '{"name": "Ada", "year":',
    "日本の首都は",
    "A haiku about rain:\n",
    "The opposite of hot is",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name FROM users WHERE",
    "Naïve café résumé:",
    "In 1969, " * 40,
)
TEXT = (
    "A server that answers many people at once keeps what it has read. When two questions begin with the same words, "
    "it reads these words once, and remembers the keys and values of every token. If there is no room left, the ones "
    "that nobody asked for lately go first; they may rest on a disk and come back when somebody needs them. "
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return locate_model("smollm2")
    except ModelError as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The model of transformers with the values that the gguf package reads."""
    reader = gguf.GGUFReader(folder.parents[2] / "models/smollm2.gguf")
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    weights = {f"{name}.weight": values[f"{stored}.weight"] for name, stored in outer.items()}
    for name, value in values.items():
        if name.startswith("blk."):
            _, layer, module, end = name.split(".")
            if module in ("attn_q", "attn_k"):
                value = value.reshape(-1, 32, 2, 576).transpose(0, 2, 1, 3).reshape(value.shape)
            weights[f"model.layers.{layer}.{names[module]}.{end}"] = value
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unknown = model.load_state_dict({n: torch.from_numpy(v.copy()) for n, v in weights.items()}, strict=False)
    assert missing == ["lm_head.weight"] and not unknown
    return model


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def test_greedy_tokens(llm: LLM, reference: Any) -> None:
    """A first difference lies only where the two best logits of the reference are as good as equal."""
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=48))
    whole = 0
    for output in outputs:
        prompt, made = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        rows = logits(reference, prompt + made)[len(prompt) - 1 : -1]
        differs = next((i for i, token in enumerate(made) if int(rows[i].argmax()) != token), None)
        whole += differs is None
        if differs is not None:
            assert float(rows[differs].max() - rows[differs][made[differs]]) <= TIE, (output.prompt, differs)
    assert whole >= len(PROMPTS) * 2 // 3


def test_perplexity(llm: LLM, reference: Any) -> None:
    (output,) = llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    tokens = list(output.prompt_token_ids)
    wanted = torch.log_softmax(logits(reference, tokens), -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean()
    found = np.mean([entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)])
    assert abs(np.exp(-found) / np.exp(-float(wanted)) - 1) < 0.005


def test_its_default_sampling_is_what_its_authors_recommend(folder: Path) -> None:
    assert '"temperature": 0.2' in (folder / "generation_config.json").read_text()


def test_a_chat(llm: LLM) -> None:
    """The template's own system prompt comes first, and the answer ends at the end of its turn."""
    (output,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=64))
    assert output.outputs[0].finish_reason == "stop"
    assert "4" in output.outputs[0].text and "<|im_end|>" not in output.outputs[0].text
