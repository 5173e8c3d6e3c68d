"""Find pypto-lib's programs of a model: a checkout whose root is on Python's path, as its documents say."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import Contract, StageName
from pypto_serving.model.qwen3 import programs
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.model.qwen3.pypto import BATCH_ROWS, MAX_TOKENS, PAGE_TOKENS, Qwen3Contract, Revision
from pypto_serving.model.registry import CheckpointConfig
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import hash128

_STAGES: tuple[StageName, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ProgramLibrary:
    """The programs of a model: our contract of them, their host functions, and a hash of their sources."""

    contract: Contract
    hosts: Mapping[StageName, Any]
    sources: bytes


def find_library(config: EngineConfig, checkpoint: CheckpointConfig) -> ProgramLibrary:
    """Find the programs; raise ConfigError where there are none for the model, or others than are known."""
    model = checkpoint.model
    if not isinstance(model, Qwen3Config):
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


def _small(config: EngineConfig, model: Qwen3Config) -> ProgramLibrary:
    """Take our own programs: pypto-lib has none of the model, or none for this number of devices."""
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
        intermediate=model.intermediate_size,
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
    """Tell the revision of the programs by where tokens are embedded."""
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
    """Return the host function beside a stage's kernels, since the contract's own may be older than these."""
    path, name = str(folder / f"{stage}_fwd.py"), f"qwen3_{stage}_host"
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path and hasattr(module, name):
            return getattr(module, name)
    raise ConfigError(f"{path} has no function {name}; see docs/npu.md for the revisions of pypto-lib that are known")
