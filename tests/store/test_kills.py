"""A kill, or a loss of power, at any point: what is listed loads as it was stored, and nothing answered for is lost."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.store.blocks import Place, all_load, key_of, listed
from tests.store.workload import KINDS, SECTOR, open_store, run
from tests.thinning import some

ROOT = Path(__file__).resolve().parents[2]


class Expected:
    """What a store must hold after the calls that were begun and ended."""

    def __init__(self) -> None:
        self.certain: dict[Place, bytes] = {}
        self.possible: dict[Place, set[bytes]] = {}

    def note(self, event: str, held: dict[Place, str], stored: list[bool]) -> None:
        if event == "open":  # slots of files are given anew
            opened = {place: key_of(name) for place, name in held.items()}
            assert set(self.certain.values()) <= set(opened.values())
            self.certain, self.possible = opened, {place: {key} for place, key in opened.items()}
            return
        for i, (place, name) in enumerate(held.items()):
            self.certain.pop(place, None)
            if event == "begin":
                self.possible.setdefault(place, set()).add(key_of(name))
            else:
                assert stored[i]
                self.certain[place], self.possible[place] = key_of(name), {key_of(name)}

    def check(self, kind: str, root: Path) -> None:
        """Open the store and compare."""
        store = open_store(kind, root)
        found = listed(store)
        assert store.inventory().writable
        assert all_load(store, found)
        if kind == "slots":
            assert self.certain.items() <= found.items()
            assert all(key in self.possible.get(place, ()) for place, key in found.items())
        else:
            assert set(self.certain.values()) <= set(found.values())
        store.close()


@pytest.mark.parametrize("kind", some(KINDS, "slots"))
def test_a_kill_at_any_point_loses_nothing_that_was_answered_for(memory_disk: Path, kind: str) -> None:
    command = [sys.executable, "-m", "tests.store.workload", str(memory_disk), kind]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    folders = list(memory_disk.iterdir())
    assert len(folders) > 80
    for folder in folders:
        expected = Expected()
        for line in (folder / "answers").read_bytes().splitlines():
            event, held, stored = msgspec.json.decode(line)
            expected.note(event, {tuple(place): name for place, name in held}, stored)
        expected.check(kind, folder / "kv")


class Recorder:
    """Keeps what system calls do to the files of a folder, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._root = root
        for name in ("pwrite", "pwritev", "fdatasync", "posix_fallocate", "ftruncate"):
            monkeypatch.setattr(os, name, self._after(name, getattr(os, name)))

    def _after(self, name: str, call: Any) -> Any:
        def recorded(file: int, *arguments: Any) -> Any:
            result = call(file, *arguments)
            path = Path(f"/proc/self/fd/{file}").readlink().relative_to(self._root)
            if name == "pwritev":
                arguments = (b"".join(bytes(data) for data in arguments[0]), arguments[1])
            if name == "pwrite":
                arguments = (bytes(arguments[0]), arguments[1])
            self.events.append((name, path, *arguments))
            return result

        return recorded


class Media:
    """A disk that keeps what was synced, and of other writes any sectors it likes."""

    def __init__(self) -> None:
        self.files: dict[Path, bytearray] = {}
        self._unsynced: dict[Path, list[tuple[int, bytes]]] = {}

    def apply(self, name: str, path: Path, *arguments: Any) -> None:
        data = self.files.setdefault(path, bytearray())
        if name in ("pwrite", "pwritev"):
            content, offset = arguments
            for start in range(offset, offset + len(content)):
                if start == offset or start % SECTOR == 0:
                    end = min(offset + len(content), (start // SECTOR + 1) * SECTOR)
                    self._unsynced.setdefault(path, []).append((start, content[start - offset : end - offset]))
        elif name == "fdatasync":
            for offset, content in self._unsynced.pop(path, ()):
                data[offset : offset + len(content)] = content
        elif name == "posix_fallocate":
            data.extend(bytes(max(0, sum(arguments) - len(data))))
        else:
            del data[arguments[0] :]
            data.extend(bytes(arguments[0] - len(data)))

    def after_power_loss(self, generator: random.Random) -> dict[Path, bytearray]:
        files = {path: bytearray(data) for path, data in self.files.items()}
        share = generator.choice((0, 0.1, 0.5, 0.9, 1))
        for path, writes in self._unsynced.items():
            for offset, content in writes:
                if generator.random() < share:
                    files[path][offset : offset + len(content)] = content
        return files


def test_a_power_loss_at_any_point_loses_nothing_that_was_answered_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        recorder = Recorder(patch, tmp_path)
        run("slots", tmp_path / "kv", lambda *event: recorder.events.append(("note", *event)))
    (folder,) = (tmp_path / "kv").iterdir()
    media, expected, generator = Media(), Expected(), random.Random(0)
    for event in recorder.events:
        if event[0] == "note":
            expected.note(*event[1:])
        else:
            media.apply(*event)
        for _ in range(4):
            root = tmp_path / "after"
            target = root / folder.name
            target.mkdir(parents=True)
            shutil.copy(folder / "meta.json", target)
            for path, data in media.after_power_loss(generator).items():
                (root.parent / "after" / path.relative_to("kv")).write_bytes(data)
            expected.check("slots", root)
            shutil.rmtree(root)
