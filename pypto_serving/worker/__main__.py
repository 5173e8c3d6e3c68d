"""Run a worker process: `python -m pypto_serving.worker FD`. FD is its end of the control pipe."""

from __future__ import annotations

import pkgutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from pypto_serving.backend.base import Backend, HostBlocks, Program
from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.ipc import SocketChannel
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Parent, run_child
from pypto_serving.store.base import Store
from pypto_serving.store.disk import open_disk
from pypto_serving.store.host import HostStore
from pypto_serving.store.remote import RemoteStore, parse_address
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.model import default_model_name
from pypto_serving.types.start import WorkerStart
from pypto_serving.types.step import ToWorker
from pypto_serving.types.tier import Tier, TierInventory, Transfers
from pypto_serving.worker.loop import Prefault, serve
from pypto_serving.worker.runner import PlanExecutor, Runner, hello
from pypto_serving.worker.transfer import Mover, TransferServer

Wrap = Callable[[Runner], PlanExecutor]


def run(parent: Parent[WorkerStart], wrap: Wrap = lambda runner: runner) -> None:
    """Open the backend, allocate its buffers, prepare the program, then open the channel and serve."""
    start, started_s = parent.start, time.monotonic()
    config = start.config
    configure_logs(config.process_name("worker"), config.log_level, config.log_format)
    backend: Backend = pkgutil.resolve_name(BACKEND_DEFAULTS[config.worker.backend].target)(config)
    backend.descendants, backend.respawned = start.descendants, start.respawned
    buffers = backend.allocate()
    program = backend.prepare(parent.progress)
    backend.watch(parent.fault)
    backend.pin_main_thread()
    folder = config.model.tokenizer or config.model.path
    own_runner = Runner(program, buffers, config.model.vocab_size, config.num_drafts, folder, ngram=config.worker.ngram)
    runner, prefault = wrap(own_runner), open_prefault(config, program, own_runner)
    stores = open_stores(program, start)
    greeting = hello(program, start.epoch, time.monotonic() - started_s, inventories(stores, start.left_out))
    channel: SocketChannel[ToWorker] = SocketChannel(socket.socket(fileno=start.channel), ToWorker)
    own: SocketChannel[Transfers] = SocketChannel(socket.socket(fileno=start.transfers), Transfers)
    transfers = TransferServer(own, Mover(program.memory, stores), start.epoch)
    heartbeat_s = start.config.faults.heartbeat_s
    serve(channel, greeting, runner, heartbeat_s, transfers.step_done, lambda: not transfers.is_busy and prefault())
    transfers.shut_down()


def open_prefault(config: EngineConfig, program: Program, runner: Runner) -> Callable[[], bool]:
    """Return the Prefault of KV memory. If ranks are on several NUMA nodes, return a function that does nothing.

    There, prefaulted memory would lie on the node of this process.
    """
    if isinstance(program.memory, HostBlocks) and len({place.node for place in config.parallel.placements}) <= 1:
        return Prefault(program.memory.arenas, program.groups, runner.batch.tables)
    return lambda: False


def open_stores(program: Program, start: WorkerStart) -> dict[Tier, Store]:
    """Open the stores of all configured tiers that are not left out.

    Raises ConfigError for an unusable folder or URL.
    """
    stores: dict[Tier, Store] = {}
    sizes = program.memory.block_bytes
    for tier in start.config.cache.tiers:
        if tier.tier in start.left_out:
            continue
        if tier.tier == "host":
            stores["host"] = HostStore(start.host_memory, sizes, tier.num_slots)
        elif tier.tier == "disk":
            stores["disk"] = open_disk(
                tier.place,
                program.fingerprint,
                sizes,
                tier.num_slots,
                tier.size_bytes,
                model=describe(start.config),
                known=start.respawned,
            )
        elif tier.tier == "remote":
            stores["remote"] = RemoteStore(parse_address(tier.place), program.fingerprint, sizes)
    return stores


def inventories(stores: Mapping[Tier, Store], left_out: Iterable[Tier]) -> tuple[TierInventory, ...]:
    """Return the inventories of stores, empty for host memory, which the core knows, and entries for tiers left out."""
    held = [store.inventory() for tier, store in stores.items() if tier != "host"]
    return (*held, *(TierInventory(tier, left_out=True) for tier in left_out))


def describe(config: EngineConfig) -> str:
    """Return a readable name for the blocks in a store: model, dtype, kernels and block sizes."""
    name = default_model_name(config.model.path) if config.model.path else f"{config.worker.backend} backend"
    tokens = "/".join(str(size) for size in dict.fromkeys(group.block_size for group in config.cache.groups))
    dtype = f"{config.model.dtype} with int8 KV" if config.cache.int8_kv else config.model.dtype
    return ", ".join(part for part in (name, dtype, config.worker.kernels, f"{tokens} tokens/block") if part)


if __name__ == "__main__":
    sys.exit(run_child(run, WorkerStart))
