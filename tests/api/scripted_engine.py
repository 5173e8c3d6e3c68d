"""An engine client that emits scripted tokens, in scripted portions, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pypto_serving.engine.client import Health, OutputStream
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import FullSpec
from pypto_serving.types.request import EngineRequest, RequestFault, RequestOutput, StepStats, Timeline
from pypto_serving.types.sampler import Logprobs
from pypto_serving.types.step import TokenLogprobs
from pypto_serving.types.tier import Tier
from tests.configs import make_config

WAIT_S = 20.0


def engine_config(vocab_size: int, **changes: object) -> EngineConfig:
    """A configuration for an engine without a model."""
    group = FullSpec(name="full", tensors=(), block_size=16)
    values: dict[str, Any] = {
        "model": "scripted",
        "backend": "null",
        "dtype": "float32",
        "num_blocks": (100,),
        "groups": (group,),
    }
    limits = {"vocab_size": vocab_size, "max_model_len": 512, "max_queued_requests": 256}
    return make_config(**{**values, **limits, **changes})


@dataclass
class Script:
    """What one request receives: `tokens` in random portions, then `finish` or `fault`, or nothing (`hang`).

    `logprob` is that of each token.
    """

    tokens: Sequence[int]
    finish: str = "length"
    stop_token_id: int | None = None
    fault: RequestFault | None = None
    hang: bool = False
    cached: int = 0
    logprob: float = -0.5


@dataclass
class Submission:
    """Some requests whose outputs are pushed in random portions, and those of them that end later."""

    stream: OutputStream
    waiting: dict[str, list[RequestOutput]]
    hanging: set[str]
    rng: random.Random
    largest_portion: int

    async def play(self) -> None:
        """Push everything."""
        while ready := [request_id for request_id, outputs in self.waiting.items() if outputs]:
            await asyncio.sleep(0)
            for output in self.portion(ready):
                self.stream.push(output)
            self.stream.deliver()

    def portion(self, ready: list[str]) -> list[RequestOutput]:
        chosen = self.rng.sample(ready, self.rng.randint(1, len(ready)))
        taken = []
        for request_id in chosen:
            outputs = self.waiting.get(request_id, [])
            count = self.rng.randint(1, min(len(outputs), self.largest_portion)) if outputs else 0
            taken += outputs[:count]
            del outputs[:count]
        return taken

    def finish(self) -> None:
        """Those that hang end with "stop"."""
        for request_id in self.hanging:
            self.stream.push(RequestOutput(request_id=request_id, finish_reason="stop"))
        self.hanging.clear()
        self.stream.deliver()

    def drop(self, request_id: str) -> bool:
        """True if it was not finished."""
        left = bool(self.waiting.pop(request_id, None)) or request_id in self.hanging
        self.hanging.discard(request_id)
        self.stream.forget(request_id)
        return left


class ScriptedEngine:
    """See EngineClient. `script` says what a request receives; `seed` decides the portions."""

    def __init__(self, config: EngineConfig, script: Callable[[EngineRequest], Script]) -> None:
        self.config = config
        self.stats = StepStats(ready=True)
        self.engines = (self,)
        self.on_stats: Callable[[StepStats], None] = lambda stats: None
        self.script = script
        self.seed = 0
        self.largest_portion = 1000
        self.refusal: Exception | None = None
        self.state = Health(ok=True, status="ready", age_s=0.25)
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.cleared: list[tuple[Tier, ...]] = []
        self.played = 0
        self.changed = threading.Condition()
        self.submissions: list[Submission] = []

    def health(self) -> Health:
        return self.state

    def require_admission(self, count: int, num_tokens: int = 0) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        self.require_admission(len(requests))
        rng = random.Random(self.seed)
        scripts = {request.request_id: self.script(request) for request in requests}
        waiting = {r.request_id: list(outputs_of(r, scripts[r.request_id], rng)) for r in requests}
        hanging = {request_id for request_id, script in scripts.items() if script.hang}
        submission = Submission(OutputStream(list(scripts), self.abort), waiting, hanging, rng, self.largest_portion)
        self.submissions.append(submission)
        asyncio.get_running_loop().create_task(self._play(submission))
        with self.changed:
            self.requests += requests
            self.changed.notify_all()
        self.stats = StepStats(ready=True, num_steps=len(self.requests), step_tokens=(len(requests),))
        self.on_stats(self.stats)
        return submission.stream

    async def _play(self, submission: Submission) -> None:
        await submission.play()
        with self.changed:
            self.played += 1
            self.changed.notify_all()

    def give_up_all(self) -> None:
        fault = RequestFault(503, "unavailable", "the server is shutting down")
        for submission in self.submissions:
            for request_id in {*submission.hanging, *submission.waiting}:
                submission.waiting.pop(request_id, None)
                submission.stream.push(RequestOutput(request_id=request_id, finish_reason="error", fault=fault))
            submission.hanging.clear()
            submission.stream.deliver()

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        self.cleared.append(tuple(tiers))

    def abort(self, request_ids: Sequence[str]) -> None:
        with self.changed:
            for request_id in request_ids:
                self.aborted += [request_id for submission in self.submissions if submission.drop(request_id)]
            self.changed.notify_all()

    def finish_hanging(self) -> None:
        """End every hanging request. To be called in the event loop's thread."""
        for submission in self.submissions:
            submission.finish()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block the calling thread until a submission, its end or an abort makes `condition` true."""
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "the engine did not get there"


def outputs_of(request: EngineRequest, script: Script, rng: random.Random) -> list[RequestOutput]:
    """The outputs of a whole request, of one to three tokens each; before them its prompt's log-probabilities."""
    limit = len(script.tokens) if request.params.max_tokens is None else request.params.max_tokens
    tokens, outputs = list(script.tokens)[:limit], list(scored_prompt(request, rng))
    while tokens:
        count = rng.randint(1, 3)
        taken, tokens = tokens[:count], tokens[count:]
        width = request.params.logprobs
        named = request.params.logprob_token_ids
        logprobs = None if width is None else [logprobs_of(i, width, script.logprob, named) for i in taken]
        outputs.append(
            RequestOutput(
                request_id=request.request_id,
                token_ids=pack_ids(taken),
                logprobs=logprobs,
                num_cached_tokens=script.cached,
            )
        )
    if not script.hang:
        outputs.append(
            RequestOutput(
                request_id=request.request_id,
                finish_reason="error" if script.fault else script.finish,
                fault=script.fault,
                stop_token_id=script.stop_token_id,
                cached_by_tier=(script.cached, 0, 0, 0),
                timeline=Timeline(arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, finished_s=4.0),
            )
        )
    return merge_finish(outputs, script)


def merge_finish(outputs: list[RequestOutput], script: Script) -> list[RequestOutput]:
    """A stop token arrives together with its finish_reason, as from a real engine."""
    if script.finish != "stop" or script.fault or len(outputs) < 2 or not outputs[-2].token_ids:
        return outputs
    *head, last, end = outputs
    merged = RequestOutput(
        request_id=last.request_id,
        token_ids=last.token_ids,
        logprobs=last.logprobs,
        finish_reason=end.finish_reason,
        stop_token_id=script.stop_token_id,
        timeline=end.timeline,
        num_cached_tokens=last.num_cached_tokens,
        cached_by_tier=end.cached_by_tier,
    )
    return [*head, merged]


def scored_prompt(request: EngineRequest, rng: random.Random) -> Iterator[RequestOutput]:
    """In portions, those of each token but the first: token i has -i / 8 and rank 2, below those that follow it."""
    width, ids = request.params.prompt_logprobs, unpack_ids(request.token_ids).tolist()
    start = 1 if width is not None else len(ids)
    while start < len(ids):
        end = min(len(ids), start + rng.randint(1, 5))
        places = range(start, end)
        start = end
        found = Logprobs(
            np.array([-i / 8 for i in places], np.float32),
            np.full(len(places), 2, np.int32),
            np.array([[ids[i] + 1 + k for k in range(width or 0)] for i in places], np.int32),
            np.array([[-i / 8 + 1 / 16 - k for k in range(width or 0)] for i in places], np.float32),
        )
        yield RequestOutput(request_id=request.request_id, prompt_logprobs=found.pack())


def logprobs_of(token_id: int, count: int, logprob: float = -0.5, named: Sequence[int] = ()) -> TokenLogprobs:
    """The sampled token is the most likely one; the others follow it in the vocabulary, or are those that are named."""
    top = named or [token_id + i for i in range(count)]
    values = np.array([logprob - i for i in range(len(top))], dtype="<f4")
    return TokenLogprobs(logprob=logprob, rank=1, top_ids=pack_ids(top), top_logprobs=values.tobytes())
