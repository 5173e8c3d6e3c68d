"""The process of a rank other than the first: load its part, and compute the steps that the leader publishes."""

from __future__ import annotations

from pypto_serving.backend.base import Progress
from pypto_serving.backend.native import NativeLoader
from pypto_serving.backend.ranks.shared_steps import READY, SharedSteps
from pypto_serving.backend.ranks.split_blocks import serve_blocks
from pypto_serving.kernels import SharedMemory
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Parent
from pypto_serving.types.start import RankStart


def run_rank(parent: Parent[RankStart]) -> None:
    """Load this rank's part of the model, then compute the steps that the leader publishes, until any rank ends."""
    start = parent.start
    config = start.config
    configure_logs(config.process_name(f"rank {start.rank}"), config.log_level, config.log_format)
    if start.config.worker.kernels == "torch":
        from pypto_serving.backend import cpu_torch

        cpu_torch.run_rank(start, parent.progress)
    else:
        _run_native(start, parent.progress)


def _run_native(start: RankStart, progress: Progress) -> None:
    """Replay the published steps on the kernels."""
    rank = start.config.parallel.topology.ranks[start.rank]
    shared = SharedSteps(start.config, rank, SharedMemory(start.memory))
    peers = shared.connect(start.links)
    loader = NativeLoader(start.config, rank)
    model = loader.load(peers, progress)
    if (blocks := start.links.get("blocks")) is not None:
        serve_blocks(blocks, model.arenas, loader.kv_spans(0), loader.kv_spans(1))
    loader.engine.pin_caller()
    progress(READY, 1, 1)
    shared.replay_published(model.step, model.draft_step)
