"""Keep others from a file that is written: the output of a run, or the folder of a server."""

from __future__ import annotations

import fcntl
from typing import BinaryIO


def lock(file: BinaryIO) -> None:
    """Lock a file until it is closed, where its file system can. Raises BlockingIOError if somebody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass
