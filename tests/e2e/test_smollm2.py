"""A real model: SmolLM2-135M-Instruct from its GGUF file, against transformers in float32 on the same weights."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openai
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pypto_serving import LLM, SamplingParams
from pypto_serving.cli.app import app
from pypto_serving.errors import ModelError
from pypto_serving.setup.locate import locate_model
from tests.e2e.server import Server
from tests.model.gguf.llama_ids import byte_letters, differing

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


def test_ids_of_the_tokenizer(folder: Path) -> None:
    """Those that llama.cpp makes of 2,000 texts, unless a text has a byte that no token stands for."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = set(tokenizer.get_vocab())
    assert not [text for text in differing("smollm2", tokenizer) if known.issuperset(byte_letters(text))]


def read_weights(file: Path) -> dict[str, Any]:
    """The tensors of the GGUF file as the gguf package reads them, under the names of transformers."""
    reader = gguf.GGUFReader(file)
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
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
    return {name: torch.from_numpy(value.copy()) for name, value in weights.items()}


def float_model(weights: dict[str, Any]) -> Any:
    """The model of transformers in float32."""
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
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unknown
    return model


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return float_model(read_weights(folder.parents[2] / "models/smollm2.gguf"))


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Convert the GGUF file as the command does; the folder of the format."""

    def convert(name: str) -> Path:
        target = tmp_path_factory.mktemp("smollm2") / name
        assert CliRunner().invoke(app, ["convert", "smollm2", str(target), "--format", name]).exit_code == 0
        return target

    return convert


def dequantised(folder: Path) -> dict[str, Any]:
    """Weights of a checkpoint of compressed-tensors: int8 with a scale a row, or 8 int4 above -8 in an int32."""
    stored = load_file(folder / "model.safetensors")
    weights = {name: value.float() for name, value in stored.items() if value.dtype == torch.bfloat16}
    for name in [name for name in weights if name.endswith("_scale")]:
        packed, scales = stored[name.replace("_scale", "_packed")], weights.pop(name)
        codes = ((packed[..., None] >> torch.arange(0, 32, 4)) & 15).reshape(len(packed), -1) - 8
        weights[name.removesuffix("_scale")] = codes * scales.repeat_interleave(32, 1)
    for name, value in stored.items():
        if value.dtype == torch.int8:
            weights[name] = value * stored[f"{name}_scale"].float()
    return weights


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def are_greedy(model: Any, prompt: list[int], made: list[int]) -> bool:
    """Whether the reference makes the same tokens; the first other one may be as good as equal."""
    rows = logits(model, prompt + made)[len(prompt) - 1 : -1]
    differs = next((i for i, token in enumerate(made) if int(rows[i].argmax()) != token), None)
    if differs is not None:
        assert float(rows[differs].max() - rows[differs][made[differs]]) <= TIE, (prompt, made, differs)
    return differs is None


def assert_greedy(llm: LLM, model: Any, max_tokens: int) -> None:
    """A first difference lies only where the two best logits of the reference are as good as equal."""
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=max_tokens))
    same = [are_greedy(model, list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]
    assert sum(same) >= len(PROMPTS) * 2 // 3


def logprobs_of_text(llm: LLM, model: Any) -> tuple[Any, Any]:
    """The log-probabilities of the tokens of TEXT, here and of the reference."""
    (output,) = llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    tokens = list(output.prompt_token_ids)
    wanted = torch.log_softmax(logits(model, tokens), -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = [entry[token].logprob for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
    return np.array(found), wanted.numpy()


def assert_same_perplexity(llm: LLM, model: Any) -> None:
    found, wanted = logprobs_of_text(llm, model)
    assert abs(np.exp(wanted.mean() - found.mean()) - 1) < 0.005


def test_greedy_tokens(llm: LLM, reference: Any) -> None:
    assert_greedy(llm, reference, 32)


def test_perplexity(llm: LLM, reference: Any) -> None:
    assert_same_perplexity(llm, reference)


def test_in_bfloat16(folder: Path, reference: Any, tmp_path: Path) -> None:
    """The checkpoint that transformers writes of the same weights, in bfloat16."""
    for file in folder.iterdir():
        if "token" in file.name:
            shutil.copy(file, tmp_path)
    model = copy.deepcopy(reference).bfloat16()
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), max_model_len=1024) as llm:
        assert_greedy(llm, model.float(), 16)
        assert_same_perplexity(llm, model)


def test_in_int4(converted: Callable[[str], Path]) -> None:
    folder = converted("w4a16")
    model = float_model(dequantised(folder))
    with LLM(str(folder), max_model_len=1024, activations="bf16") as llm:
        assert_greedy(llm, model, 16)
        assert_same_perplexity(llm, model)


def test_in_int8(converted: Callable[[str], Path]) -> None:
    """Inputs of products are rounded with a scale a token; the kernels lose no more by it than the reference does."""
    folder = converted("w8a8")
    model = float_model(dequantised(folder))
    with LLM(str(folder), max_model_len=1024) as llm:
        found, exact = logprobs_of_text(llm, model)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]))
        _, wanted = logprobs_of_text(llm, model)
    assert np.abs(found - exact).mean() <= 1.2 * np.abs(wanted - exact).mean()


def rounded(values: torch.Tensor) -> torch.Tensor:
    scales = values.abs().amax(-1, keepdim=True) / 127
    return (values / scales).round() * scales


def test_activations_in_int8(folder: Path, reference: Any) -> None:
    with LLM(str(folder), max_model_len=1024, activations="int8") as llm:
        found, wanted = logprobs_of_text(llm, reference)
    assert np.abs(found - wanted).mean() <= 0.15


def test_its_default_sampling_is_what_its_authors_recommend(folder: Path) -> None:
    assert '"temperature": 0.2' in (folder / "generation_config.json").read_text()


def test_a_chat(llm: LLM) -> None:
    """The template's own system prompt comes first, and the answer ends at the end of its turn."""
    (output,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=64))
    assert output.outputs[0].finish_reason == "stop"
    assert "4" in output.outputs[0].text and "<|im_end|>" not in output.outputs[0].text


@pytest.fixture(scope="module")
def ask(folder: Path) -> Iterator[Callable[..., Any]]:
    """Ask a server, started by the short name, through OpenAI's client: `ask(text, ...)`."""
    with Server("smollm2", "--max-model-len", "1024") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def ask(*texts: str, system: str | None = None, **fields: Any) -> Any:
            roles = ["system"] * (system is not None) + ["user", "assistant"] * 2
            messages = [
                {"role": role, "content": text}
                for role, text in zip(roles, filter(None, (system, *texts)), strict=False)
            ]
            return client.chat.completions.create(model="smollm2", messages=messages, temperature=0, **fields)

        yield ask


QUESTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("What is the capital of France?",), {}),
    (("Tell me about the sea.",), {"system": "You are a pirate."}),
    (("My name is Ada.", "Hello Ada!", "What is my name?"), {}),
)


@pytest.mark.parametrize(("texts", "fields"), QUESTIONS)
def test_chats_over_http(
    ask: Callable[..., Any], reference: Any, texts: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """The tokens are the reference's, and a stream has the same text."""
    answer = ask(*texts, **fields, max_tokens=24, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    are_greedy(reference, answer.prompt_token_ids, choice.token_ids)
    pieces = [piece.choices[0] for piece in ask(*texts, **fields, max_tokens=24, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
    assert pieces[-1].finish_reason == choice.finish_reason


def test_stop_strings_over_http(ask: Callable[..., Any]) -> None:
    (whole,) = ask("Count to ten.", max_tokens=24).choices
    stop = whole.message.content.split()[3]
    (cut,) = ask("Count to ten.", max_tokens=24, stop=[stop]).choices
    assert (cut.message.content, cut.finish_reason) == (whole.message.content.partition(stop)[0], "stop")


def test_tools_over_http(ask: Callable[..., Any]) -> None:
    """Its template knows no tools, so they are described in words; a call that is required is one."""
    properties = {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}
    parameters = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    function = {"name": "weather", "description": "The weather in a city", "parameters": parameters}
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    (choice,) = ask("What is the weather in Oslo?", **asked, max_tokens=60).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments)["city"] in properties["city"]["enum"]
    deltas = [
        piece.choices[0].delta for piece in ask("What is the weather in Oslo?", **asked, max_tokens=60, stream=True)
    ]
    pieces = [call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments
