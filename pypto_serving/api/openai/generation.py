"""All sequences of one HTTP request, from submission to their last token."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from pypto_serving.api.errors import EngineFaultError
from pypto_serving.api.openai.choice import Choice, Delta
from pypto_serving.api.service import Service
from pypto_serving.engine.stream import Pause
from pypto_serving.errors import RequestError, RequestFailedError
from pypto_serving.types.request import EngineRequest, RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TIERS, Tier
from pypto_serving.types.tokens import pack_ids

logger = logging.getLogger("pypto_serving.api")

Consume = Callable[[list[Delta]], Pause]
"""Takes all deltas that wait, in order."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and how to continue it; `params.n` is the number of choices. See EngineRequest."""

    token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class Generation:
    """The choices of one request. Owned by the handler that made it, which must call `close`.

    Choices are numbered prompt by prompt. Making one admits it: raises QueueFullError or UnavailableError.
    """

    __slots__ = (
        "_arrival_s",
        "_choices",
        "_closed",
        "_num_prompts",
        "_observe_first",
        "_observe_next",
        "_open",
        "_outputs",
        "_service",
        "id",
    )

    def __init__(self, service: Service, prompts: Sequence[Prompt], kind: str) -> None:
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self._service = service
        self._arrival_s = time.monotonic()
        self._num_prompts = len(prompts)
        self._choices: dict[str, Choice] = {}
        self._observe_first = service.metrics.first_token.observe
        self._observe_next = service.metrics.next_token.observe
        requests = self._requests(prompts)
        service.admission.enter()
        try:
            self._outputs = service.engine.submit(requests)
        except BaseException:
            service.admission.leave()
            raise
        self._open = len(requests)
        self._closed = False

    @property
    def choices(self) -> list[Choice]:
        """In the order of their index."""
        return list(self._choices.values())

    async def run(self, consume: Consume) -> None:
        """Hand every delta to `consume`, those that came together at once, until every choice has finished.

        Raises EngineFaultError where the engine gave up on one of them, and what `consume` raises.
        """
        await self._outputs.deliver_to(partial(self._take, consume))
        if self._open:
            raise RequestFailedError("the engine ended this request without an answer; send it again")

    def _take(self, consume: Consume, outputs: list[RequestOutput]) -> Pause:
        now_s = time.monotonic()
        deltas: list[Delta] = []
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None or choice.finish_reason is not None:
                continue
            if output.token_ids:
                (self._observe_next if choice.num_tokens else self._observe_first)(now_s - choice.last_s)
                choice.last_s = now_s
            delta = choice.take(output)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._finish(choice, output, now_s)
            deltas.append(delta)
        return consume(deltas) if deltas else None

    def close(self) -> None:
        """End the request: what is unfinished is aborted. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        unfinished = [choice for choice in self._choices.values() if choice.finish_reason is None]
        if unfinished:
            self._count_aborted(unfinished)
        self._outputs.close()
        self._service.admission.leave()

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object; the tokens of a prompt count once, however many choices it has."""
        choices = self.choices
        prompts = choices[:: len(choices) // self._num_prompts]
        num_prompt = sum(choice.num_prompt for choice in prompts)
        num_output = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.num_cached for choice in prompts),
                "cached_tokens_by_tier": _sum_by_tier(choice.cached_by_tier for choice in prompts),
            },
        }

    def _requests(self, prompts: Sequence[Prompt]) -> list[EngineRequest]:
        limit = self._service.engine.config.max_queued_requests
        total = sum(prompt.params.n for prompt in prompts)
        if total > limit:
            message = f"{len(prompts)} prompts make {total} sequences, but this server queues at most {limit}"
            raise RequestError(message, param="prompt" if len(prompts) > 1 else "n")
        requests = []
        for prompt in prompts:
            drawn = prompt.params.seed if prompt.params.seed is not None else self._service.draw_seed()
            seed, token_ids = drawn & (2**64 - 1), pack_ids(prompt.token_ids)
            params = msgspec.structs.replace(prompt.params, n=1)
            for choice in range(prompt.params.n):
                requests.append(self._request(prompt, token_ids, params, seed, choice))
        return requests

    def _request(
        self, prompt: Prompt, token_ids: bytes, params: SamplingParams, seed: int, choice: int
    ) -> EngineRequest:
        index = len(self._choices)
        request_id = f"{self.id}-{index}"
        made = Choice(index, request_id, prompt.token_ids, params, self._service.tokenizer)
        made.last_s = self._arrival_s
        self._choices[request_id] = made
        return EngineRequest(
            request_id=request_id,
            token_ids=token_ids,
            params=params,
            eos_token_ids=self._service.eos_token_ids,
            seed=seed,
            choice=choice,
            priority=prompt.priority,
            arrival_s=self._arrival_s,
            cache_salt=prompt.cache_salt,
        )

    def _finish(self, choice: Choice, output: RequestOutput, now_s: float) -> None:
        service = self._service
        reason = choice.finish_reason if choice.finish_reason and output.fault is None else "error"
        self._open -= 1
        e2e_s = now_s - self._arrival_s
        service.metrics.observe_finish(reason, choice.num_prompt, choice.num_tokens, e2e_s, output.timeline)
        if output.fault is not None:
            raise EngineFaultError(output.fault)
        if reason == "error":
            raise RequestFailedError("the engine failed on this request; send it again")
        if output.finish_reason is None:
            service.engine.abort([choice.request_id])

    def _count_aborted(self, unfinished: list[Choice]) -> None:
        for choice in unfinished:
            self._service.metrics.observe_finish("abort", choice.num_prompt, choice.num_tokens, 0.0, None)
        tokens = sum(choice.num_tokens for choice in unfinished)
        logger.info("aborted %s: %d unfinished choices after %d output tokens", self.id, len(unfinished), tokens)


def _sum_by_tier(counts: Iterable[tuple[int, ...]]) -> dict[Tier, int]:
    """Tokens by tier, over prompts that have ended; one that has not counts nothing."""
    totals = [sum(column) for column in zip(*(entry for entry in counts if entry), strict=True)]
    return dict(zip(TIERS, totals or [0] * len(TIERS), strict=True))
