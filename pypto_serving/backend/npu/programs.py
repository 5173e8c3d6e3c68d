"""Find the programs of a model, in pypto-lib or our own, and keep compiled programs on disk."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pypto_serving.backend.npu.runtime import META_FILE, Runtime
from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import Argument, Contract, Sizes, StageName
from pypto_serving.model.decoder.recipe import DecoderConfig
from pypto_serving.model.qwen3 import programs
from pypto_serving.model.qwen3.pypto import BATCH_ROWS, MAX_TOKENS, PAGE_TOKENS, Qwen3Contract, Revision
from pypto_serving.model.registry import CheckpointConfig
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import hash128

_STAGES: tuple[StageName, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ProgramLibrary:
    """The programs of a model: their contract, their host functions, and a hash of their sources."""

    contract: Contract
    hosts: Mapping[StageName, Any]
    sources: bytes


def find_library(config: EngineConfig, checkpoint: CheckpointConfig) -> ProgramLibrary:
    """Find the programs. Raise ConfigError if the model has none, or their revision is unknown."""
    model = checkpoint.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(f"the npu backend has no program for {checkpoint.architecture}")
    if obstacle := Qwen3Contract.obstacle(model):
        raise ConfigError(f"the programs of the npu backend cannot serve {config.model.path}: {obstacle}")
    theirs = _find_contract(checkpoint) if config.parallel.topology.tensor == 1 else None
    if theirs is None:
        return _small(config, model)
    ours = Qwen3Contract(model, _revision(theirs), config.limits.max_model_len, config.limits.max_num_batched_tokens)
    _require_limits(theirs.limits, ours)
    folder = Path(inspect.getfile(theirs.load_kernels)).parent
    files = sorted(folder.rglob("*.py"))
    sources = hash128(theirs.abi_fingerprint().encode(), *(file.read_bytes() for file in files))
    return ProgramLibrary(ours, {stage: _host(folder, stage) for stage in _STAGES}, sources)


def _small(config: EngineConfig, model: DecoderConfig) -> ProgramLibrary:
    """Take our own programs if pypto-lib has none for the model, or none for this number of devices."""
    devices = config.parallel.topology.tensor
    contract = Qwen3Contract(
        model, "2026-08", config.limits.max_model_len, config.limits.max_num_batched_tokens, devices
    )
    sizes = SimpleNamespace(
        devices=devices,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate=model.mlp_widths[0],
        padded_vocab=contract.vocabulary,
        tokens=contract.most["T"],
        pages=contract.table_width,
        positions=MAX_TOKENS,
        eps=model.rms_norm_eps,
    )
    if obstacle := programs.obstacle(sizes):
        raise ConfigError(f"the programs of the npu backend cannot serve {config.model.path}: {obstacle}")
    hosts = dict(zip(_STAGES, programs.build(sizes), strict=True))
    return ProgramLibrary(contract, hosts, hash128(*(file.read_bytes() for file in programs.sources())))


def _find_contract(checkpoint: CheckpointConfig) -> Any:
    """Return pypto-lib's contract of a model, with its kernels loaded, or None. Raises ConfigError."""
    if importlib.util.find_spec("contract") is None:
        return None
    names = {"architecture": checkpoint.architecture, "head_dim": checkpoint.model.head_dim}
    try:
        contract = importlib.import_module("contract").find_contract_for_model_config(
            SimpleNamespace(**{**checkpoint.raw, **names})
        )
        contract.load_kernels()
    except (LookupError, NotImplementedError):
        return None
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"pypto-lib's programs cannot be loaded ({error}); docs/npu.md says which revisions go with which PyPTO"
        ) from None
    return contract


def _revision(theirs: Any) -> Revision:
    """Return the revision of the programs, recognized by where tokens are embedded."""
    names = [argument.name for argument in theirs.kernels["decode"].args]
    return "2026-06" if "hidden_states" in names else "2026-08"


def _require_limits(limits: Mapping[str, Any], ours: Qwen3Contract) -> None:
    wanted = {
        "batch": BATCH_ROWS,
        "max_seq": MAX_TOKENS,
        "page_size": PAGE_TOKENS,
        "vocab": ours.vocabulary,
        "real_vocab": ours.model.vocab_size,
        "num_layers": ours.model.num_layers,
    }
    for name, value in wanted.items():
        if limits.get(name) != value:
            raise ConfigError(f"pypto-lib's contract has the limit {name} {limits.get(name)}, but must have {value}")


def _host(folder: Path, stage: StageName) -> Any:
    """Return the host function beside a stage's kernels, since the contract's own may be older than the kernels."""
    path, name = str(folder / f"{stage}_fwd.py"), f"qwen3_{stage}_host"
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path and hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(f"{path} has no function {name}; see docs/npu.md for the revisions of pypto-lib that are known")


class Programs:
    """Owns the folder `cache_dir`/npu or, without `cache_dir`, a temporary folder that ends with this process."""

    def __init__(self, runtime: Runtime, cache_dir: str) -> None:
        self._runtime = runtime
        self._temporary = None if cache_dir else tempfile.TemporaryDirectory(prefix="pypto-npu-")
        self._folder = Path(cache_dir) / "npu" if self._temporary is None else Path(self._temporary.name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let only one process at a time compile and prepare, since the first one builds kernels beside its program."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # chip processes inherit the open file

    def get(self, stage: str, host: Any, sources: bytes, arguments: Sequence[Argument], sizes: Sizes) -> Any:
        """Return the compiled program of `host`; compile it unless one with this hash of `sources` is kept.

        Raises ConfigError, also if the program takes other arguments.
        """
        shapes = "; ".join(f"{each.name} {each.dtype} {each.resolve(sizes)}" for each in arguments)
        words = (self._runtime.platform, stage, shapes)
        key = hash128(self._runtime.identity, sources, *(word.encode() for word in words)).hex()
        folder = self._folder / key
        if not (folder / META_FILE).exists():
            self._compile(folder, host, arguments, sizes)
        _require_names(folder, arguments)
        return self._runtime.load(folder)

    def _compile(self, folder: Path, host: Any, arguments: Sequence[Argument], sizes: Sizes) -> None:
        """Compile in a temporary folder, so that an unfinished program is never used."""
        place = self._folder / "compiling"
        shutil.rmtree(place, ignore_errors=True)
        self._runtime.compile(host, arguments, sizes, place)
        shutil.rmtree(folder, ignore_errors=True)
        place.rename(folder)


def _require_names(folder: Path, arguments: Sequence[Argument]) -> None:
    """Raise ConfigError if a program takes other arguments, or in another order.

    The compiler appends a version to each name.
    """
    params = json.loads((folder / META_FILE).read_text())["params"]
    found = [each["name"].partition("__ssa_v")[0] for each in params]
    wanted = [argument.name for argument in arguments]
    for place, (theirs, ours) in enumerate(zip_longest(found, wanted), start=1):
        if theirs != ours:
            raise ConfigError(
                f"the compiled program takes {len(found)} arguments, and the contract names {len(wanted)}: number "
                f"{place} is {theirs}, not {ours}; see docs/npu.md"
            )
