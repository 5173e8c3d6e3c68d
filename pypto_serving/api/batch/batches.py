"""Run the batches of a server one after the other. The next server continues unfinished batches."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pypto_serving.api.batch.running import AnswerFile, Direct, Found, Limits, Run, check, read
from pypto_serving.api.batch.schemas import FINAL, Batch, BatchBody, BatchError, BatchErrors, RequestCounts
from pypto_serving.api.batch.store import MAX_BATCHES, KeyStore, occupy, read_salt
from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.threads import in_slow_thread
from pypto_serving.util import brief, one_of

logger = logging.getLogger("pypto_serving.api")

MAX_REQUESTS = 50_000
OUTPUT_PURPOSE = "batch_output"


class Batches:
    """Owns the batches of all clients, in `folder`. Used in the server's event loop only.

    `salt` is part of the names of clients, which last as long as the folder. At most `width` requests of a batch run at
    once. Raises ConfigError if the folder cannot be used, or if another server uses it.
    """

    def __init__(self, folder: Path, direct: Direct, max_line_bytes: int, width: int) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = occupy(folder)
            self.salt = read_salt(folder)
            for store in KeyStore.of_all(folder):
                store.clear_up()
        except OSError as error:
            raise ConfigError(f"the folder of batches {folder} cannot be used: {error.strerror}") from error
        self._folder = folder
        self._direct = direct
        self._max_line_bytes = max_line_bytes
        self._width = width
        self._waiting: deque[tuple[KeyStore, str]] = deque()
        self._arrived = asyncio.Event()
        self._running: tuple[str, Run, AnswerFile] | None = None
        self._task: asyncio.Task[None] | None = None

    def store(self, client: str) -> KeyStore:
        """Return the files and batches of a client."""
        return KeyStore.of(client, self._folder)

    def start(self) -> None:
        """Continue unfinished batches, then run new ones as they come."""
        for store in KeyStore.of_all(self._folder):
            for batch in reversed(store.batches()):
                if batch.status not in FINAL:
                    self._waiting.append((store, batch.id))
        self._arrived.set()
        self._task = asyncio.create_task(self._run_all())

    async def close(self) -> None:
        """Stop the running batch; the next server continues unfinished ones."""
        if self._running is not None:
            self._running[1].left.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lock.close()

    def create(self, store: KeyStore, body: BatchBody) -> Batch:
        """Store a batch and put it in the queue. Raises RequestError."""
        if body.endpoint not in self._direct.paths:
            message = f"endpoint is {brief(body.endpoint)}, but must be {one_of(sorted(self._direct.paths))}"
            raise RequestError(message, param="endpoint")
        store.file(body.input_file_id)
        store.require_room()
        self._make_room(store)
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=_now(),
            metadata=body.metadata,
        )
        store.save(batch)
        self._waiting.append((store, batch.id))
        self._arrived.set()
        return batch

    def _make_room(self, store: KeyStore) -> None:
        """If there are too many batches, forget the oldest ended ones. Raises RequestError if none has ended."""
        batches = store.batches()
        for batch in reversed(batches):
            if len(batches) < MAX_BATCHES:
                return
            if batch.status in FINAL:
                batches.remove(batch)
                store.forget(batch)
        if len(batches) >= MAX_BATCHES:
            raise RequestError(f"{MAX_BATCHES} batches have not ended; cancel some", code="too_many_batches")

    def cancel(self, store: KeyStore, batch_id: str) -> Batch:
        """End a batch, but keep its answers so far. Raises RequestError if there is none, or it has ended already."""
        batch = self.shown(store.batch(batch_id))
        if batch.status in FINAL:
            raise RequestError(f"the batch is {batch.status} already", param="batch_id", code="batch_ended")
        batch = replace(batch, status="cancelling", cancelling_at=_now())
        if self._running is not None and self._running[0] == batch_id:
            self._running[1].left.set()
        else:
            batch = replace(batch, status="cancelled", cancelled_at=_now())
        store.save(batch)
        return batch

    def needs(self, store: KeyStore, file_id: str) -> bool:
        """Return whether an unfinished batch reads or writes a file."""
        running = [batch for batch in store.batches() if batch.status not in FINAL]
        return any(file_id in (batch.input_file_id, batch.output_file_id) for batch in running)

    def shown(self, batch: Batch) -> Batch:
        """Return a batch with its current counts."""
        if self._running is None or self._running[0] != batch.id:
            return batch
        return replace(batch, request_counts=_counts(batch.request_counts.total, self._running[2]))

    async def _run_all(self) -> None:
        while True:
            while self._waiting:
                store, batch_id = self._waiting.popleft()
                try:
                    await self._run(store, batch_id)
                except Exception as error:  # of whatever kind, the next batches go on
                    expected = isinstance(error, OSError | ValueError | RequestError)
                    logger.warning("batch %s failed: %s", batch_id, error, exc_info=not expected)
                    reason = getattr(error, "strerror", None) or str(error)
                    problem = BatchError(f"the server gave up this batch: {reason}", None, "storage_failed")
                    with suppress(OSError, RequestError):
                        store.save(_failed(store.batch(batch_id), [problem]))
            self._arrived.clear()
            await self._arrived.wait()

    async def _run(self, store: KeyStore, batch_id: str) -> None:
        batch = store.batch(batch_id)
        if batch.status == "cancelling":  # a server was killed meanwhile
            store.save(replace(batch, status="cancelled", cancelled_at=_now()))
        limits = Limits(MAX_REQUESTS, self._max_line_bytes, {batch.endpoint})
        source = store.content(batch.input_file_id)
        if batch.status == "validating":
            found = await in_slow_thread(check, source, limits)
            batch = _begun(store, store.batch(batch_id), found)
        if batch.status == "in_progress" and batch.output_file_id is not None:
            output = await in_slow_thread(AnswerFile, store.content(batch.output_file_id))
            run = Run(self._direct, output, self._width, client=store.client)
            self._running = batch_id, run, output
            try:
                if store.batch(batch_id).status == "in_progress":  # it may have been cancelled while reading the output
                    await run.answer(read(source, limits))
            finally:
                self._running = None
                output.close()
            _end(store, store.batch(batch_id), output)


def _begun(store: KeyStore, batch: Batch, found: Found) -> Batch:
    """Begin a batch if all `found` requests are valid, else fail it. Do nothing if it was cancelled meanwhile."""
    if batch.status in FINAL:
        return batch
    if found.problems:
        batch = _failed(batch, [BatchError(problem.message, problem.line) for problem in found.problems])
    else:
        target = store.new_file(f"{batch.id}_output.jsonl", OUTPUT_PURPOSE, _now())
        counts = RequestCounts(total=found.num_requests)
        begun: dict[str, Any] = {"in_progress_at": _now(), "output_file_id": target.id}
        batch = replace(batch, status="in_progress", request_counts=counts, **begun)
    store.save(batch)
    return batch


def _failed(batch: Batch, problems: list[BatchError]) -> Batch:
    return replace(batch, status="failed", failed_at=_now(), errors=BatchErrors(problems))


def _end(store: KeyStore, batch: Batch, output: AnswerFile) -> None:
    """End a batch that is cancelled or has all answers. Otherwise this server is ending, and the next continues it."""
    batch = replace(batch, request_counts=_counts(batch.request_counts.total, output))
    if batch.status == "cancelling":
        batch = replace(batch, status="cancelled", cancelled_at=_now())
    elif batch.status == "in_progress" and len(output.answered) == batch.request_counts.total:
        batch = replace(batch, status="completed", finalizing_at=_now(), completed_at=_now())
    store.save(batch)


def _counts(total: int, output: AnswerFile) -> RequestCounts:
    return RequestCounts(total, len(output.answered) - output.num_failed, output.num_failed)


def _now() -> int:
    return int(time.time())
