"""`kv stat|verify|clear`: what a folder of blocks holds, whether it is whole, and how it goes away."""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from pypto_serving.cli import main
from pypto_serving.store.disk import DiskStore
from pypto_serving.store.files import FileStore
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, NUM_SLOTS, Disk, as_nobody, key_of, listed, put

HELD = {(0, 0): key_of("a"), (0, 1): key_of("b"), (1, 2): key_of("c")}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv", [])


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = main(["kv", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fill(disk: Disk, fingerprint: bytes = FINGERPRINT) -> None:
    store = disk.open(fingerprint=fingerprint)
    assert all(put(store, HELD))
    store.close()


def fill_files(root: Path) -> None:
    store = FileStore(root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS)
    assert all(put(store, HELD))
    store.close()


class Terminal(io.StringIO):
    """Input that says it is typed."""

    def isatty(self) -> bool:
        return True


def damage(root: Path, name: str) -> None:
    (path,) = root.rglob(name)
    data = bytearray(path.read_bytes())
    data[8000] ^= 1
    path.write_bytes(data)


def test_stat_lists_groups_and_who_uses_them(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    store = disk.open(fingerprint=b"another")
    code, out, err = run(capsys, "stat", disk.root)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0][:5] == ["part", "model", "kept", "as", "in"]
    assert sorted(line[-4:] for line in lines[1:5]) == [
        ["0", "8192", "0", "6"],
        ["0", "8192", "2", "4"],
        ["1", "1000", "0", "4"],
        ["1", "1000", "1", "3"],
    ]
    assert {line[3] for line in lines[1:5:2]} == {"yes", "no"}
    store.close()


@pytest.mark.parametrize("kind", ["slots", "files"])
def test_stat_as_json(disk: Disk, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    fill(disk) if kind == "slots" else fill_files(disk.root)
    code, out, _ = run(capsys, "stat", disk.root, "--json")
    (folder,) = json.loads(out)["folders"]
    assert code == 0
    assert (folder["kind"], folder["in_use"], folder["fingerprint"]) == (kind, False, FINGERPRINT.hex())
    assert [group["num_blocks"] for group in folder["groups"]] == [2, 1]
    assert [group["num_free"] for group in folder["groups"]] == ([4, 3] if kind == "slots" else [None, None])
    assert folder["num_bytes"] > 3 * 8192


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(capsys, command, tmp_path) == (0, f"{tmp_path} holds no blocks\n", "")


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_that_cannot_be_read(capsys: pytest.CaptureFixture[str], command: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "kv"
        root.mkdir()
        run(capsys, command, root)  # imports what nobody may not read
        fill(Disk(root, []))
        Path(name).chmod(0o755)
        root.chmod(mode)
        with as_nobody():
            code, out, err = run(capsys, command, root)
        root.chmod(0o755)
    reason = "permission denied; give the folder that the option kv-disk names"
    assert (code, out, err) == (2, "", f"error: {root} cannot be read: {reason}\n")


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_path_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, place: str) -> None:
    path = tmp_path / place
    if place == "file":
        path.touch()
    code, out, err = run(capsys, command, path)
    reason = "not a directory" if place == "file" else "no such file or directory"
    assert (code, out) == (2, "")
    assert err == f"error: {path} cannot be read: {reason}; give the folder that the option kv-disk names\n"


def test_verify_finds_nothing_wrong(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    (path,) = disk.folders()
    code, out, err = run(capsys, "verify", disk.root)
    assert (code, out) == (0, f"{path.name}: 3 blocks, 0 damaged\n")
    assert re.fullmatch(rf"reading {path.name}: \d+\.\d\d s\n", err)


def test_verify_drops_damaged_slots(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    damage(disk.root, "g0.slab")
    code, out, _ = run(capsys, "verify", disk.root)
    assert code == 1
    assert "3 blocks, 1 damaged, dropped" in out
    assert run(capsys, "verify", disk.root)[0] == 0
    store = disk.open()
    assert listed(store) == {place: key for place, key in HELD.items() if place != (0, 0)}
    store.close()


def test_verify_leaves_what_a_server_uses(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    damage(disk.root, "g0.slab")
    store = disk.open()
    code, out, _ = run(capsys, "verify", disk.root)
    assert code == 1
    assert "1 damaged; a server uses this part" in out
    assert listed(store) == HELD
    store.close()


def test_verify_drops_damaged_files(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill_files(disk.root)
    damage(disk.root, f"{key_of('a').hex()}.0")
    code, out, _ = run(capsys, "verify", disk.root)
    assert code == 1
    assert "3 blocks, 1 damaged, dropped" in out
    assert not list(disk.root.rglob(f"{key_of('a').hex()}.0"))


def test_a_later_format_is_named_and_left_alone(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    disk.file("meta.json").write_text('{"format": 9}')
    assert "format 9, made by a later version" in run(capsys, "stat", disk.root)[1]
    assert "is skipped" in run(capsys, "verify", disk.root)[1]
    assert run(capsys, "clear", disk.root, "--yes")[1] == "deleted 0 B\n"
    assert len(disk.folders()) == 1


def test_an_earlier_format_is_named(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks are not damaged, but of no use to this version."""
    fill(disk)
    path = disk.file("meta.json")
    path.write_text(path.read_text().replace('"format":2', '"format":1'))
    assert "format 1, made by an earlier version" in run(capsys, "stat", disk.root)[1]
    out = run(capsys, "verify", disk.root)[1]
    assert "is skipped" in out and "format 1, made by an earlier version" in out and "damaged" not in out


def test_clear_deletes_what_no_server_uses(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    fill(disk)
    fill(disk, b"third")
    fill_files(disk.root)
    store = disk.open(fingerprint=b"another")
    (disk.root / "notes").touch()
    code, out, _ = run(capsys, "clear", disk.root, "--yes")
    assert code == 0
    assert out.splitlines()[0] == "in use by a server, and kept: 1 of 4 parts"
    assert out.splitlines()[1].startswith("deleted ")
    assert len(disk.folders()) == 1
    assert all(put(store, HELD))
    store.close()
    run(capsys, "clear", disk.root, "--yes")
    assert [path.name for path in disk.root.iterdir()] == ["notes"]
    assert run(capsys, "clear", disk.root)[:2] == (0, "nothing to delete\n")


def test_what_goes_while_clear_asks_is_gone(
    disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(disk)
    fill(disk, b"another")
    gone, left = disk.folders()

    class Answer(Terminal):
        def readline(self, size: int | None = -1, /) -> str:
            shutil.rmtree(gone)
            return "y\n"

    monkeypatch.setattr("sys.stdin", Answer())
    code, out, err = run(capsys, "clear", disk.root)
    assert (code, err) == (0, "")
    assert "deleted " in out and "deleted 0 B" not in out
    assert not left.exists()


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 1), ("", 130, 1)])
def test_clear_asks(
    disk: Disk,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    left: int,
) -> None:
    fill(disk)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    actual, out, _ = run(capsys, "clear", disk.root)
    assert (actual, len(disk.folders())) == (code, left)
    assert ("nothing was deleted\n" in out) == (code == 1)


def test_without_a_terminal_clear_says_how_to_confirm(
    disk: Disk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(disk)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run(capsys, "clear", disk.root) == (
        2,
        "",
        "error: stdin is not a terminal, so nobody can confirm; give --yes to delete without asking\n",
    )
    assert len(disk.folders()) == 1


@pytest.mark.parametrize("kind", [DiskStore, FileStore])
def test_stat_names_the_model(
    disk: Disk, capsys: pytest.CaptureFixture[str], kind: type[DiskStore] | type[FileStore]
) -> None:
    """A folder that was made without a name gets one at the next start, and keeps it and its blocks."""

    def opened(model: str) -> DiskStore | FileStore:
        if kind is FileStore:
            return FileStore(disk.root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, model=model)
        return DiskStore(disk.root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30, model=model)

    def named() -> str:
        (folder,) = json.loads(run(capsys, "stat", disk.root, "--json")[1])["folders"]
        return str(folder["model"])

    store = opened("")
    assert all(put(store, HELD))
    store.close()
    assert named() == ""
    for given in ("Small, 32 tokens/block", "a copy"):
        store = opened(given)
        assert set(listed(store).values()) == set(HELD.values())
        store.close()
        assert named() == "Small, 32 tokens/block"
    assert "Small, 32 tokens/block" in run(capsys, "stat", disk.root)[1]
