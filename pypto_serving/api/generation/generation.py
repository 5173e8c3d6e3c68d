"""Submit a request to the engine, deliver the deltas of its choices, abort it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import msgspec

from pypto_serving.api.generation.choice import Choice, ChoiceOutput, Delta, StopPatterns, TokenUsage, count_usage
from pypto_serving.api.generation.ending import ABORTED, log_end, trace_end
from pypto_serving.api.generation.request import GenerationRequest, check_num_choices, engine_requests
from pypto_serving.api.http.allowance import ALLOWANCE
from pypto_serving.api.service import Service
from pypto_serving.engine.client import Pause
from pypto_serving.engine.history import Finished
from pypto_serving.errors import RequestFailedError
from pypto_serving.types.request import RequestOutput, Timeline
from pypto_serving.types.step import NOT_FINITE
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")
Consume = Callable[[list[Delta]], Pause]
"""Takes all waiting deltas, in order. Returns an awaitable to finish before it takes more, or None."""


class Generation:
    """Runs the choices of one request. Owned by its creator, which must call `close`.

    The constructor submits the request. It raises QueueFullError, UnavailableError or KeyLimitError if the request is
    not admitted, RequestError if it has more choices than the server can ever hold. The request's `prompt_logprobs`
    are filled before the first delta of a prompt's first choice.
    """

    def __init__(self, service: Service, request: GenerationRequest) -> None:
        self.id = request.id
        self._request = request
        self._service = service
        self._arrival_s = time.monotonic()
        self._first_token = service.metrics.first_token
        self._next_token = service.metrics.next_token
        check_num_choices(request.num_choices, len(request.prompts), service.engine.config)
        requests = engine_requests(request, service.seeds, service.eos_token_ids, self._arrival_s)
        params = request.params
        stops = StopPatterns(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._choices = {
            made.request_id: Choice(i, made, request, service.tokenizer, stops) for i, made in enumerate(requests)
        }
        self.prompt_logprobs = request.prompt_logprobs
        self._allowance = ALLOWANCE.get()
        num_prompt = sum(len(prompt.token_ids) for prompt in request.prompts)
        service.admission.enter()
        try:
            if self._allowance is not None:
                self._allowance.require()
            self._outputs = service.engine.submit(requests)
        except BaseException:
            service.admission.leave()
            raise
        if self._allowance is not None:
            self._allowance.enter(num_prompt)
        for request_id, replica in self._outputs.replicas.items():
            self._choices[request_id].replica = replica
        self._open = len(requests)
        self._given_up: list[Choice] = []
        self._closed = False

    @property
    def choices(self) -> list[Choice]:
        """Return the choices in the order of their index."""
        return list(self._choices.values())

    async def run(self, consume: Consume) -> None:
        """Pass every delta to `consume` until all choices have finished; deltas that arrive together stay together.

        Raises RequestFailedError if the engine gave a choice up or ended one without a reason, and the errors of
        `consume`. If several choices end at once, all are counted before an error is raised.
        """
        await self._outputs.deliver_to(partial(self._take, consume))
        if self._open:
            raise RequestFailedError("the engine ended this request without an answer; send it again")

    async def collect(self) -> list[ChoiceOutput]:
        """Run to the end; return the whole output of each choice. Raises the errors of `run`."""
        outputs = [ChoiceOutput(choice.index) for choice in self._choices.values()]

        def add(deltas: list[Delta]) -> None:
            for delta in deltas:
                outputs[delta.index].add(delta)

        await self.run(add)
        return outputs

    def _take(self, consume: Consume, outputs: list[RequestOutput]) -> Pause:
        now_s = time.monotonic()
        deltas: list[Delta] = []
        failure: RequestFailedError | None = None
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None or choice.finish_reason is not None:
                continue
            if output.token_ids:
                if choice.num_tokens:
                    self._next_token[choice.replica].observe(now_s - choice.last_s)
                else:
                    self._first_token[choice.replica].observe(now_s - choice.last_s)
                    choice.begin(output)
                choice.last_s = now_s
            elif output.prompt_logprobs is not None:
                self.prompt_logprobs[choice.prompt].add(output.prompt_logprobs)
                continue
            delta = choice.take(output)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                ended = self._finish(choice, output, now_s)
                failure = failure or ended
            deltas.append(delta)
        if failure is not None:
            raise failure
        return consume(deltas) if deltas else None

    def close(self) -> None:
        """End the request and abort unfinished choices. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        unfinished = [choice for choice in self._choices.values() if choice.finish_reason is None]
        self._count_aborted(unfinished)
        if not (unfinished or self._given_up):
            longest = max(choice.num_tokens for choice in self._choices.values())
            params, prompts = self._request.params, self._request.prompts
            max_tokens, replica = max(prompt.max_tokens for prompt in prompts), self.choices[0].replica
            self._service.metrics.observe_answer(params.n, max_tokens, longest, replica)
        self._outputs.close()
        self._service.admission.leave()
        if self._allowance is not None:
            self._allowance.leave(sum(choice.num_tokens for choice in self._choices.values()))
        self._tell_end()

    def _tell_end(self) -> None:
        """Log the request and describe it in its trace, if these are enabled."""
        service, request = self._service, self._request
        if service.serving.log_requests:
            log_end(request, self.choices, service.tokenizer, service.serving.max_log_len)
        if request.trace is not None:
            trace_end(request.trace, request, self.choices, service.model_name)

    def usage(self) -> TokenUsage:
        """Count the tokens so far."""
        return count_usage(self.choices)

    def _finish(self, choice: Choice, output: RequestOutput, now_s: float) -> RequestFailedError | None:
        """Count the end of a choice; return the error if the engine gave it up."""
        service = self._service
        reason = choice.finish_reason if choice.finish_reason and output.fault is None else "error"
        self._open -= 1
        e2e_s = now_s - self._arrival_s
        timeline = choice.timeline
        if timeline is not None and output.finish_reason is None:  # a stop string ended it here
            timeline = choice.timeline = msgspec.structs.replace(timeline, finished_s=now_s)
        count, cached = choice.num_tokens, choice.num_cached
        service.metrics.observe_finish(reason, choice.num_prompt, count, e2e_s, timeline, cached, choice.replica)
        self._remember(choice, reason, timeline)
        if (fault := output.fault) is not None:
            if self._request.trace is not None:
                self._request.trace.fail(fault.code, fault.message)
            if fault.code == NOT_FINITE:
                service.metrics.count_corrupted()
            if fault.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._given_up.append(choice)
            return RequestFailedError(fault.message, param=fault.param, code=fault.code, status=fault.status)
        if reason == "error":
            self._given_up.append(choice)
            return RequestFailedError("the engine failed on this request; send it again")
        if output.finish_reason is None:
            service.engine.abort([choice.request_id])
        return None

    def _remember(self, choice: Choice, reason: str, timeline: Timeline | None) -> None:
        if timeline is not None:
            ended = Finished(
                id=choice.request_id,
                reason=reason,
                prompt_tokens=choice.num_prompt,
                output_tokens=choice.num_tokens,
                cached_tokens=choice.num_cached,
                timeline=timeline,
            )
            self._service.history.finish(ended)

    def _count_aborted(self, unfinished: list[Choice]) -> None:
        """Count `unfinished` choices, and log them with those that the engine gave up."""
        for choice in unfinished:
            num_prompt, count, replica = choice.num_prompt, choice.num_tokens, choice.replica
            self._service.metrics.observe_finish(ABORTED, num_prompt, count, 0.0, None, replica=replica)
            if choice.timeline is not None:
                ended = choice.timeline = msgspec.structs.replace(choice.timeline, finished_s=time.monotonic())
                self._remember(choice, ABORTED, ended)
        if cut := unfinished + self._given_up:
            tokens = sum(choice.num_tokens for choice in cut)
            choices = counted(len(cut), "unfinished choice")
            logger.info("aborted %s: %s after %s", self.id, choices, counted(tokens, "output token"))
