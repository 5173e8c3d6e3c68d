"""Find the file system of a path, and whether other hosts may write to it."""

from __future__ import annotations

import re
from pathlib import Path

_SHARED = re.compile(
    r"nfs\d?|lustre|ceph|gpfs|beegfs|9p|fuse|fuse\..*|cifs|smb3|afs|orangefs|pvfs2|gfs2?|ocfs2|virtiofs|glusterfs|wekafs"
)


def is_shared(path: Path, mountinfo: str | None = None) -> bool:
    """Return whether hosts share the file system of `path`, which need not exist; `mountinfo` as in proc(5)."""
    return _SHARED.fullmatch(file_system(path, mountinfo)) is not None


def file_system(path: Path, mountinfo: str | None = None) -> str:
    """Return the type of the file system that `path` lies on, such as `ext4`; empty if unknown."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    resolved, best, found = path.resolve(), -1, ""
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(_unescape(mount.split()[4]))
        if resolved.is_relative_to(point) and len(point.parts) >= best:  # later mounts cover earlier ones
            best, found = len(point.parts), source.split()[0]
    return found


def _unescape(text: str) -> str:
    """Decode the octal numbers that stand for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
