"""Systems under test: how each is installed, its flags, and the workloads that its API accepts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import compare_install as install
from compare_install import Say
from compare_servers import Launch, PeerError
from tokenizers import Tokenizer

VLLM, LLAMA, TRANSFORMERS, ZENTORCH = "0.32.0", "0.3.36", "5.23.0", "2.13.0.2"
GIB = 1 << 30
ALLOWED_CPUS = sorted(os.sched_getaffinity(0))
CPUS = len(ALLOWED_CPUS)
ALL = ("W1", "W2", "W3", "W4", "W5", "P99", "T1")
FEW = ("W1", "W2", "W3")
OURS = "ours"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with weights; `small` is true for that of T1."""

    folder: Path
    small: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return dict(json.loads((self.folder / "config.json").read_text()))

    @property
    def state(self) -> int:
        """Return when its weights were last written."""
        return max(int(file.stat().st_mtime) for file in self.folder.glob("*.safetensors"))

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size; prompts are random ids below it."""
        return int(self.config["vocab_size"])

    def texts(self, tokens: int, count: int, seed: int) -> str:
        """Return JSON lines with random prompts of about `tokens` tokens as text, joined from visible ASCII tokens."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        visible = [text for text in tokenizer.get_vocab() if text.isascii() and text.isalnum()]
        rng = random.Random(seed)
        prompts = ("".join(rng.choices(visible, k=tokens)) for _ in range(count))
        cut = (tokenizer.decode(tokenizer.encode(prompt).ids[:tokens]) for prompt in prompts)
        return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in cut)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values for `tokens` tokens at 2 bytes a number."""
        config = self.config
        return 2 * 2 * tokens * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


class Peer(Protocol):
    """One system. `prepare` installs it if needed and returns facts for the report. `launch` needs it first."""

    name: str
    title: str
    workloads: Sequence[str]

    def beside(self) -> Ours: ...

    def prepare(self, root: Path, say: Say) -> dict[str, Any]: ...

    def launch(self, checkpoint: Checkpoint) -> Launch: ...


@dataclass(frozen=True)
class Form:
    """Another form of the checkpoint, which our own `convert` writes, as GPTQ on request; and options to serve it."""

    group_size: int
    options: tuple[str, ...] = ()
    gptq: bool = False

    def make(self, checkpoint: Checkpoint, root: Path, say: Say) -> Checkpoint:
        """Return the checkpoint in this form, made once per state of its weights beside the environments."""
        name = f"{checkpoint.folder.name}-{checkpoint.state}-w4a16-g{self.group_size}"
        folder = root / "checkpoints" / name
        _make(folder, say, "-m", "pypto_serving", "convert", checkpoint.folder, folder, "--format", "w4a16",
              "--group-size", self.group_size)  # fmt: skip
        if self.gptq:
            source, folder = folder, folder.with_name(f"{name}-gptq")
            _make(folder, say, Path(__file__).with_name("make_gptq.py"), source, folder)
        return Checkpoint(folder)


INT4 = Form(32, ("--head", "int8"))
INT4_TITLE = "pypto-serving, int4 g32, output layer int8"
GPTQ = Form(128, gptq=True)


class Ours:
    """This repository's server with default options.

    checkpoint: replaces that of W1 to W5, if given. form: the checkpoint is served in that form, and with its options.
    options: further ones.
    """

    def __init__(
        self,
        name: str = OURS,
        title: str = "pypto-serving",
        checkpoint: Path | None = None,
        form: Form | None = None,
        workloads: Sequence[str] = ALL,
        options: tuple[str, ...] = (),
    ) -> None:
        self.name, self.title, self.workloads = name, title, workloads
        self._checkpoint, self._form, self._options = checkpoint, form, options

    def beside(self) -> Ours:
        """Return the server that this one is compared with."""
        return Ours()

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Return facts; there is nothing to install."""
        self._root, self._say = root, say
        return install.own_facts()

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch. The KV bytes per token are those of the program's own memory plan."""
        if self._form is not None:
            checkpoint = self._form.make(checkpoint, self._root, self._say)
        folder, options = self._checkpoint or checkpoint.folder, self._options
        if self._form is not None:
            options += self._form.options
        program = [sys.executable, "-m", "pypto_serving"]
        plan = subprocess.run([*program, "check", str(folder), *options, "--json"], capture_output=True, text=True)
        if plan.returncode:
            raise PeerError(plan.stderr.strip())
        planned = json.loads(plan.stdout)
        return Launch(
            lambda port: [*program, "serve", str(folder), "--port", str(port), *options],
            " ".join(options) or "default options",
            kv_token_bytes=sum(group["block_bytes"] // group["block_tokens"] for group in planned["memory"]["groups"]),
            token_bytes=planned["weights"]["token_bytes"],
            environment={"PYTHONPATH": str(install.REPOSITORY)},
        )


class Vllm:
    """vLLM's CPU build on all CPUs, with the libraries preloaded that its manual names."""

    name, workloads = "vllm", ALL
    title = f"vLLM {VLLM} (CPU)"
    ranks = 1

    def beside(self) -> Ours:
        """Return our server with default options."""
        return Ours()

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Install it and return facts."""
        self._env = install.vllm(root, say, VLLM)
        return self._env.facts

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch. The KV arena has a fixed size and is written at start."""
        space = 2 if checkpoint.small or self.ranks > 1 else 5
        return vllm_launch(self._env, checkpoint.folder, space, ranks=self.ranks)


def vllm_launch(
    env: install.Environment, folder: Path, space: int, flags: Sequence[str] = (), ranks: int = 1
) -> Launch:
    """Return the launch of an installed vLLM with `space` GiB of KV cache a rank."""
    flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", *flags]
    if ranks > 1:
        flags += ["--tensor-parallel-size", str(ranks)]
    cpus = [ALLOWED_CPUS[rank::ranks] for rank in range(ranks)]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(space),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in cpus),
    }
    preloads = install.preloads(env)
    shown = [f"{key}={value}" for key, value in variables.items()]
    shown.append(f"LD_PRELOAD={':'.join(path.name for path in preloads)}")
    program = env.folder / "bin" / "vllm"
    return Launch(
        lambda port: [str(program), "serve", str(folder), "--port", str(port), *flags],
        " ".join([*shown, *flags]),
        kv_bytes=ranks * space * GIB,
        environment={
            **variables,
            "LD_PRELOAD": ":".join(map(str, preloads)),
            "VLLM_CACHE_ROOT": str(env.folder / "cache"),
            **_silent(env.folder / "bin"),
        },
    )


class VllmTp2(Vllm):
    """vLLM on two ranks, beside our server on two."""

    name, workloads, ranks = "vllm-tp2", FEW, 2
    title = f"vLLM {VLLM} (CPU), two ranks"

    def beside(self) -> Ours:
        """Return our server on two ranks."""
        return Ours(title="pypto-serving --tp 2", options=("--tp", "2"))


class VllmGptq(Vllm):
    """vLLM and our server on one GPTQ checkpoint."""

    name, workloads = "vllm-gptq", FEW
    title = f"vLLM {VLLM} (CPU), GPTQ g128"

    def beside(self) -> Ours:
        """Return our server on the same checkpoint."""
        return Ours(title="pypto-serving, GPTQ g128", form=GPTQ)

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Install it and return facts."""
        self._root, self._say = root, say
        return super().prepare(root, say)

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch with that checkpoint."""
        return super().launch(GPTQ.make(checkpoint, self._root, self._say))


class VllmZen(Vllm):
    """vLLM with AMD's zentorch on the path, which it then computes with."""

    name = "vllm-zen"
    title = f"vLLM {VLLM} (CPU) with zentorch {ZENTORCH}"

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Install both."""
        facts = super().prepare(root, say)
        self._zentorch = install.zentorch(root, say, ZENTORCH, self._env)
        versions = {**facts["versions"], **self._zentorch.facts["versions"]}
        return {**facts, "bytes": facts["bytes"] + self._zentorch.facts["bytes"], "versions": versions}

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch with one more folder of packages."""
        plain = super().launch(checkpoint)
        return replace(plain, environment={**plain.environment, "PYTHONPATH": str(self._zentorch.folder)})


class Llama:
    """llama-server in bf16. The slots share the context equally."""

    name, workloads = "llama", ALL
    title = f"llama.cpp (llama-cpp-python {LLAMA}), bf16"
    quantization = ""

    def beside(self) -> Ours:
        """Return our server with default options."""
        return Ours()

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Compile it, and install the reader of checkpoints."""
        self._say = say
        self._reader = install.transformers(root, say, TRANSFORMERS)
        self._env = install.llama(root, say, LLAMA)
        return self._env.facts

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch. The KV arena is written at start."""
        source = f"{checkpoint.folder.name}-{checkpoint.state}"
        file = install.gguf(checkpoint.folder, source, self._env, LLAMA, self._reader, self._say)
        if self.quantization:
            file = install.requantised(file, self._env, self.quantization, self._say)
        slots, context = (64, 16_384) if checkpoint.small else (32, 69_632)
        flags = ["-t", CPUS, "-tb", CPUS, "-c", context, "-np", slots, "--no-kv-unified"]
        words = [str(flag) for flag in flags]
        program = self._env.folder / "build" / "bin" / "llama-server"
        return Launch(
            lambda port: [str(program), "-m", str(file), "--port", str(port), *words],
            " ".join(words),
            kv_bytes=checkpoint.kv_bytes(context),
        )


class LlamaQ4(Llama):
    """llama-server on what its own llama-quantize makes of the checkpoint, beside our server on our 4 bits."""

    name, workloads = "llama-q4", (*FEW, "W4")
    title = f"llama.cpp (llama-cpp-python {LLAMA}), Q4_0"
    quantization = "Q4_0"

    def beside(self) -> Ours:
        """Return our server with 4 bits."""
        return Ours(title=INT4_TITLE, form=INT4)


class Transformers:
    """transformers serve with continuous batching. Its API takes text and cannot ignore an end token."""

    name, workloads = "transformers", ("W1", "W2", "W3", "W4", "T1")
    title = f"transformers {TRANSFORMERS} serve"

    def beside(self) -> Ours:
        """Return our server with default options."""
        return Ours()

    def prepare(self, root: Path, say: Say) -> dict[str, Any]:
        """Install it and return facts."""
        self._env = install.transformers(root, say, TRANSFORMERS)
        return self._env.facts

    def launch(self, checkpoint: Checkpoint) -> Launch:
        """Return the launch. The KV arena has a fixed number of blocks."""
        size, count = 32, 900
        flags = f"--continuous-batching --device cpu --dtype bfloat16 --cb-block-size {size} --cb-num-blocks {count}"
        program = self._env.folder / "bin" / "transformers"
        return Launch(
            lambda port: [str(program), "serve", str(checkpoint.folder), *flags.split(), "--port", str(port)],
            f"OMP_NUM_THREADS={CPUS} {flags}",
            kv_bytes=checkpoint.kv_bytes(size * count),
            environment={"OMP_NUM_THREADS": str(CPUS), **_silent(self._env.folder / "bin")},
            text=True,
            model=str(checkpoint.folder),
        )


def _make(folder: Path, say: Say, *arguments: object) -> None:
    """Run a Python program that writes a checkpoint to `folder`, unless it is there. Raises PeerError."""
    if (folder / "config.json").exists():
        return
    say(f"making {folder}")
    made = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(install.REPOSITORY)}
    )
    if made.returncode:
        raise PeerError(f"{folder} could not be made; the message is above")


def _silent(programs: Path) -> Mapping[str, str]:
    """Return variables that disable the model hub and usage reports and put `programs` first in PATH."""
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PATH": path}


USUAL = ("vllm", "llama", "transformers")
"""The peers of a complete comparison."""
FOUR_BITS = ("int4", "llama-q4", "vllm-gptq")
"""The pairs of 4-bit weights."""


def _int4() -> Ours:
    return Ours("int4", INT4_TITLE, form=INT4, workloads=(*FEW, "W4"))


RANKS = ("tp2", "pp2", "vllm-tp2")
"""The pairs of two ranks of one thread each, with our one rank of two and with vLLM's two ranks."""


def _ranks(name: str) -> Callable[[], Ours]:
    option = f"--{name[:2]}"
    return lambda: Ours(name, f"pypto-serving {option} 2", workloads=FEW, options=(option, "2"))


PEERS: dict[str, Callable[[], Peer]] = {
    "vllm": Vllm,
    "vllm-zen": VllmZen,
    "vllm-gptq": VllmGptq,
    "llama": Llama,
    "llama-q4": LlamaQ4,
    "transformers": Transformers,
    "int4": _int4,
    "tp2": _ranks("tp2"),
    "pp2": _ranks("pp2"),
    "vllm-tp2": VllmTp2,
}
