"""Loads a checkpoint and prints what memory that took: `python -m tests.model.loading PATH DTYPE KERNELS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.model.sequences import load_program


def memory() -> dict[str, int]:
    """Bytes of this process by their names in /proc: what is resident, and the most that ever was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")}


def main(path: str, dtype: str, kernels: str) -> None:
    """Print bytes resident before weights are loaded, the most until all are, and how often progress was reported."""
    seen: list[tuple[int, int]] = []
    states: list[dict[str, int]] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "weights":
            seen.append((done, total))
            states.append(memory())

    load_program(Path(path), dtype, num_blocks=2, max_model_len=256, threads=1, kernels=kernels, progress=progress)
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] > 0 and seen == sorted(seen)
    print(json.dumps({"before": states[0]["VmRSS"], "most": states[-1]["VmHWM"], "reports": len(seen)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
