"""What documents name: paths in backticks, and the files that are meant."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("pypto_serving", "benchmarks")
PATH = re.compile(r"[\w.][\w./-]*(?:\.(?:py|h|cpp|md|txt)|/)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named_paths(text: str) -> set[str]:
    """Files and folders in backticks."""
    return {found for found in re.findall(r"`([^`\n]+)`", text) if PATH.fullmatch(found)}


def files_of(path: str) -> list[Path]:
    """Files meant by a path below the root or the package, a folder, or the bare name of a file in the code folders."""
    for base in (ROOT, ROOT / "pypto_serving"):
        if (base / path).is_dir():
            return sorted((base / path).rglob("*.py")) or sorted((base / path).iterdir())
        if (base / path).is_file():
            return [base / path]
    return [] if "/" in path else [file for folder in CODE_FOLDERS for file in sorted((ROOT / folder).rglob(path))]


def exists(path: str) -> bool:
    return bool(files_of(path))
