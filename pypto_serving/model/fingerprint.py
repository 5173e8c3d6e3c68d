"""Digests of weight files, and fingerprints of everything except tokens that determines KV blocks. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import Progress, weight_files
from pypto_serving.model.formats.section import section_file
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import hash128, open_regular, read_regular

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Bytes that one thread reads and digests at once. Digests depend on this size."""
MAX_RECORDS = 256
"""Limit of records, one per folder of weights; the oldest are deleted first."""
SETTLED_NS = 2 * 10**9
"""A file that changed more recently than this may change again without a change of its times."""


def file_state(path: Path) -> str:
    """Return a text that changes with a file's content: name, size, inode and times. Raises ModelError."""
    stat = _stat(path)
    return f"{path.name} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def digests(files: Sequence[Path], cache: str, progress: Progress) -> list[bytes]:
    """Digest `files` of one folder, each to 32 bytes. Raises ModelError if one cannot be read, or changes meanwhile.

    Digests are remembered below the folder `cache`, empty for none, by the state of their files.
    Reports `progress("digests", bytes done, bytes in total)` if it has to read any.
    """
    record = Path(cache, "digests", hash128(os.fsencode(files[0].parent.resolve())).hex()) if cache else None
    states = {file: file_state(file) for file in files}
    kept = _read(record) if record else {}
    found = {state: kept[state] for state in states.values() if state in kept}
    unread = {file: state for file, state in states.items() if state not in found}
    if unread:
        lasting = {state for file, state in unread.items() if _has_settled(file)}
        fresh = _digest_all(unread, progress)
        if record:
            _write(record, found | {state: fresh[state] for state in lasting})
        found |= fresh
    return [bytes.fromhex(found[state]) for state in states.values()]


def _has_settled(path: Path) -> bool:
    """Return whether every later change of a file would change its state.

    A change time in whole seconds was not set by the system, but comes from the image of a read-only file system.
    """
    stat = _stat(path)
    newest_ns = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return stat.st_ctime_ns % 10**9 != 0 and time.time_ns() - newest_ns > SETTLED_NS


def _digest_all(states: Mapping[Path, str], progress: Progress) -> dict[str, str]:
    """Digest files one after the other, each on all CPUs. Return digests by state."""
    done, total = 0, sum(_stat(file).st_size for file in states)

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress("digests", done, total)

    found = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for file, state in states.items():
            try:
                found[state] = _digest(pool, file, count)
            except OSError as error:
                raise ModelError(f"{file} cannot be read: {error.strerror}") from None
            if file_state(file) != state:
                raise ModelError(f"{file} was changed while it was read; start again when it is complete")
    return found


def _digest(pool: ThreadPoolExecutor, path: Path, count: Callable[[int], None]) -> str:
    """Return the SHA-256 of a file's size and of the SHA-256 of each chunk, in hexadecimal digits."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        offsets = range(0, size, CHUNK_BYTES)
        for offset, chunk in zip(offsets, pool.map(partial(_digest_chunk, file.fileno()), offsets), strict=True):
            digest.update(chunk)
            count(min(CHUNK_BYTES, size - offset))
    return digest.hexdigest()


def _digest_chunk(file: int, offset: int) -> bytes:
    return hashlib.sha256(os.pread(file, CHUNK_BYTES, offset)).digest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _read(record: Path) -> dict[str, str]:
    """Read digests by state; return {} if the record is missing or damaged."""
    try:
        check, body = read_regular(record).split(b"\n", 1)
        return msgspec.json.decode(body, type=dict[str, str]) if check == _check(body) else {}
    except (OSError, ValueError):
        return {}


def _write(record: Path, known: Mapping[str, str]) -> None:
    """Replace a record atomically, so that other processes see a complete one. Delete the oldest records."""
    body = msgspec.json.encode(known)
    try:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=record.parent, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(_check(body) + b"\n" + body)
                file.flush()
                temporary.replace(record)
            finally:
                temporary.unlink(missing_ok=True)
        for old in sorted(record.parent.iterdir(), key=_changed_ns)[:-MAX_RECORDS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("digests of weights are not kept in %s: %s", record.parent, error.strerror)


def _changed_ns(path: Path) -> int:
    """Return when a file changed; 0 if another process has deleted it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _check(body: bytes) -> bytes:
    return hash128(body).hex().encode()


def checkpoint_state(model_dir: str | Path) -> bytes:
    """Hash the states of configuration and weight files to 16 bytes, which name the checkpoint on this machine."""
    directory = Path(model_dir)
    files = (*_config_files(directory), *weight_files(directory))
    return hash128(*(file_state(file).encode() for file in files))


@contextlib.contextmanager
def unchanged(model_dir: str | Path) -> Iterator[None]:
    """Raise ModelError at the end if a configuration or weight file was changed meanwhile."""
    state = checkpoint_state(model_dir)
    yield
    if checkpoint_state(model_dir) != state:
        raise ModelError(f"{model_dir} was changed while it was loaded; start again when it is complete")


def checkpoint_digest(model_dir: str | Path, cache: str, progress: Progress) -> bytes:
    """Hash the configuration and every byte of the weight files to 16 bytes, which name the checkpoint everywhere.

    See `digests` for `cache`, `progress` and errors.
    """
    return hash128(*_contents(Path(model_dir), cache, progress).values())


def file_digests(model_dir: str | Path, cache: str, progress: Progress) -> dict[str, bytes]:
    """Return, by file name, a 16-byte digest of each file that `checkpoint_digest` covers."""
    return {name: hash128(content) for name, content in _contents(Path(model_dir), cache, progress).items()}


def _contents(directory: Path, cache: str, progress: Progress) -> dict[str, bytes]:
    """Return the bytes of files of configuration, and the digests of weight files, by name."""
    files = weight_files(directory)
    configuration = {file.name: read_regular(file) for file in _config_files(directory)}
    return configuration | dict(zip((file.name for file in files), digests(files, cache, progress), strict=True))


def _config_files(directory: Path) -> tuple[Path, ...]:
    beside = section_file(directory)
    return (directory / "config.json",) if beside is None else (directory / "config.json", beside)


def overrides_part(config: EngineConfig) -> tuple[str, ...]:
    """Return the part of a key that values in place of those of config.json make; empty without any."""
    given = config.model.hf_overrides
    return (f"hf_overrides {json.dumps(given, sort_keys=True)}",) if given else ()


def program_fingerprint(
    config: EngineConfig, progress: Progress, architecture: str, program: str, *numerics: str
) -> bytes:
    """Hash everything except tokens that the content of a KV block depends on to 16 bytes.

    Reads all bytes of the weights only if other processes may read blocks, or if blocks outlive the replica.
    """
    if config.cache.shares_kv:
        weights = checkpoint_digest(config.model.path, config.worker.cache_dir, progress)
    else:
        weights = checkpoint_state(config.model.path)
    blocks = tuple(
        " ".join((group.name, str(group.block_size), *(tensor.dtype for tensor in group.tensors)))
        for group in config.cache.groups
    )
    rope, activations = f"max_model_len {config.limits.max_model_len}", f"activations {config.model.activations}"
    overrides = overrides_part(config)
    words = (architecture, config.model.dtype, rope, activations, *overrides, *blocks, program, *numerics)
    return hash128(weights, *(word.encode() for word in words))
