"""All ranks of a program in one process, a thread each, behind the interface of one program.

Ranks of two hosts have no memory in common: pairs of sockets connect them.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.backend.base import HostBlocks, Progress, StepInputs, StepOutput
from pypto_serving.backend.native import NativeLoader
from pypto_serving.backend.ranks.split_blocks import SplitBlocks, serve_blocks
from pypto_serving.kernels import Engine, Link, Links, NativeCollectives, Recording, SharedMemory, runnable
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.registry import Serving, load_spec, read_config
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.step import BackendTraits
from tests.configs import change_config
from tests.model.cpu_backend import config_for
from tests.model.sequences import Array, Sequences

PATIENCE_S = 20.0
UNUSED = ("steps", "blocks")
"""Connections of the backend; here all ranks get their steps at once."""
PROMPTS = (np.arange(3, 75) % 131, np.arange(70, 5, -1))


class RankedProgram:
    """Owns the ranks of a checkpoint. `models` are theirs in order."""

    def __init__(
        self,
        path: Path,
        topology: Topology,
        progress: Progress = lambda *_: None,
        kv_dtype: str = "auto",
        **changes: Any,
    ) -> None:
        drafts = changes.get("num_drafts", 0) > 0
        checkpoint = read_config(path)
        model = checkpoint.served_model(drafts)
        groups = load_spec(path, Serving("bfloat16", kv_dtype=kv_dtype, drafts=drafts)).kv_groups
        traits = BackendTraits(max_drafts=changes.get("num_drafts", 0))
        config = config_for(path, "bfloat16", kernels=runnable()[0], groups=groups, traits=traits, **changes)
        self.config = change_config(config, num_blocks=(40,) * len(config.cache.groups))
        self.groups, self.num_blocks = self.config.cache.groups, self.config.cache.num_blocks
        program = checkpoint.family.native_program
        memories, links = [SharedMemory.create() for _ in range(topology.hosts)], connect(topology)
        self.models, self._peers = [], []
        for rank in topology.ranks:
            engine = Engine(self.config.worker.kernels, 1)
            weights = PackedWeights(path, engine, progress)
            ends = {name: Link(fd, PATIENCE_S) for name, fd in links[rank.index].items() if name not in UNUSED}
            shared = (SharedMemory(memories[rank.host].fd), 1, Links(**ends), self.config.limits.max_num_batched_tokens)
            peers = NativeCollectives(rank, *shared) if topology.num_ranks > 1 else NativeCollectives()
            self._peers.append(peers)
            self.models.append(program(model, weights, engine, self.config, rank, peers))
        self.memory = HostBlocks(self.models[0].arenas)
        if topology.hosts > 1:
            first, other = self.models[0], self.models[topology.on_host(1)[0].index]
            loader = NativeLoader(self.config, topology.ranks[0])
            spans, ends = [loader.kv_spans(host) for host in (0, 1)], topology.connections["blocks"]
            serve_blocks(links[ends[1]]["blocks"], other.arenas, *spans)
            self.memory = SplitBlocks(first.arenas, *spans, links[ends[0]]["blocks"], PATIENCE_S)
        self._threads = ThreadPoolExecutor(topology.num_ranks)
        self._rows = self._begun = 0

    def submit(self, inputs: StepInputs, _sampling: Any = None) -> None:
        """Compute a step on all ranks at once."""
        self._replay([model.step for model in self.models], inputs)

    def draft(self, inputs: StepInputs) -> Array:
        """Logits of a pass of draft layers."""
        self._replay([model.draft_step for model in self.models], inputs)
        return self._logits()

    def _replay(self, steps: list[Recording], inputs: StepInputs) -> None:
        arrays = (inputs.token_ids, inputs.positions, inputs.query_start, inputs.context_lens, inputs.logits_rows)
        groups = (inputs.slot_mapping, inputs.block_tables)
        for each in [self._threads.submit(step.replay, *arrays, *groups) for step in steps]:
            each.result()
        self._rows, self._begun = len(inputs.logits_rows), self._begun + 1

    def collect(self) -> StepOutput:
        return StepOutput(logits=self._logits())

    def _logits(self) -> Array:
        found: Array = self._peers[0].await_logits(self.models[0].logits, 0, self._begun)
        return found[: self._rows]


def connect(topology: Topology) -> dict[int, dict[str, int]]:
    """File descriptors of the connections of each rank, by name."""
    links = defaultdict[int, dict[str, int]](dict)
    for name, ranks in topology.connections.items():
        for rank, end in zip(ranks, socket.socketpair(), strict=True):
            links[rank][name] = end.detach()
    return links


def outcome(program: RankedProgram) -> tuple[Array, list[Array]]:
    """Logits of a few steps with prefills in chunks, decodes and drafts, and the pages then."""
    sequences, drafts = Sequences(program), list[Array]()
    first, second = (sequences.add(prompt) for prompt in PROMPTS)
    for work in ([(first, 37)], [(first, 30), (second, 1)], [(second, 40), (first, 1)], [(first, 1), (second, 1)]):
        sequences.step(work, everywhere=True)
        if program.config.num_drafts and len(work) > 1:
            drafts += [*np.concatenate(sequences.draft([first, second], program.config.num_drafts))]
    for group, num_blocks in enumerate(program.num_blocks):
        program.memory.read_blocks(group, range(num_blocks))
    logits = [row for sequence in (first, second) for row in sequence.logits.values()]
    return np.stack(logits + drafts), [arena.copy() for arena in program.memory.arenas]


def assert_same_bits(path: Path, *topologies: Topology, **changes: Any) -> None:
    """Compare ranks with one rank: logits and pages."""
    logits, pages = outcome(RankedProgram(path, Topology(), **changes))
    assert np.isfinite(logits).all() and logits.std() > 0
    for topology in topologies:
        found, arenas = outcome(RankedProgram(path, topology, **changes))
        assert np.array_equal(found, logits), f"logits differ with {topology}"
        for arena, wanted in zip(arenas, pages, strict=True):
            assert np.array_equal(arena, wanted), f"pages differ with {topology}"
