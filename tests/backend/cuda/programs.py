"""Programs of the CUDA backend on the fake device, and simulations that run them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pypto_serving.backend.cuda.backend import CudaBackend
from pypto_serving.backend.cuda.program import CudaProgram
from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.sampling import SamplingParams
from tests.backend.cuda.fake_device import FakeDevice
from tests.backend.cuda.hash_model import HashModel
from tests.checkpoints import make_checkpoint
from tests.configs import change_config, make_config
from tests.simulation import Simulation, in_pages

SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BLOCK = 64


def tiny_checkpoint(path: Path, **overrides: Any) -> Path:
    return make_checkpoint(path, dtype="bfloat16", through="bfloat16", **(SIZES | overrides))


def config_for(path: Path, **changes: Any) -> EngineConfig:
    spec = load_spec(path, Serving("bfloat16"))
    defaults = BACKEND_DEFAULTS["cuda"]
    config = make_config(
        model=str(path),
        backend="cuda",
        dtype="bfloat16",
        vocab_size=spec.vocab_size,
        groups=in_pages(spec.kv_groups, BLOCK),
        num_blocks=(40,),
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        depth=defaults.depth,
        traits=msgspec.structs.replace(defaults.traits, padded_rows=(1, 2, 4, 8)),
    )
    return change_config(config, **changes)


class FakeProgram:
    """A program on a device of its own, which does nothing before somebody waits for it."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = FakeDevice()
        with self.device.opened():
            self.program = self._prepare(config)

    def _prepare(self, config: EngineConfig) -> CudaProgram:
        backend = CudaBackend(config)
        backend._open = lambda *_: self.device  # type: ignore[method-assign]
        return backend.prepare(lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def submit(self, *arguments: Any) -> None:
        with self.device.opened():
            self.program.submit(*arguments)


class HashProgram(FakeProgram):
    """The same around a model that is quick."""

    def _prepare(self, config: EngineConfig) -> CudaProgram:
        program = CudaProgram(HashModel(config), config, b"hashes", self.device)
        program.capture(lambda *_: None)
        return program


def hash_config(**changes: Any) -> EngineConfig:
    defaults = BACKEND_DEFAULTS["cuda"]
    tensor = KVTensorSpec(name="kv", layers=(0,), dtype="bfloat16", row_shape=(4,))
    config = make_config(
        model="",
        backend="cuda",
        dtype="bfloat16",
        vocab_size=97,
        groups=(FullSpec(name="kv", tensors=(tensor,), block_size=8),),
        num_blocks=(60,),
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        depth=defaults.depth,
        traits=msgspec.structs.replace(defaults.traits, padded_rows=(1, 2, 4, 8)),
    )
    return change_config(config, **changes)


def simulate(config: EngineConfig, program: type[FakeProgram] = HashProgram) -> Simulation:
    return Simulation(config, make_program=program)


def answers(path: Path, prompts: Sequence[list[int]], budget: int = 64, together: bool = False) -> list[list[int]]:
    """The likeliest three tokens after each prompt, one request after the other or all at once."""
    config = config_for(path, max_model_len=64, max_num_batched_tokens=budget, max_num_seqs=4, num_blocks=(6,))
    simulation, names = simulate(config, FakeProgram), []
    for prompt in prompts:
        names.append(simulation.add(prompt, params=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
        if not together:
            simulation.run()
    simulation.run()
    return [simulation.tokens[name] for name in names]


def shortfall(model: Any, prompt: list[int], output: list[int]) -> float:
    """How much less than the best logit of a model of transformers a chosen one is, in deviations of logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best, chosen = logits.max(-1).values, logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((best - chosen).max() / logits.std())
