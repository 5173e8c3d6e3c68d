"""Data-parallel replicas in virtual time: real schedulers and KV managers behind the real router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pypto_serving.bench.simulator import PROMPT_VOCABULARY, Machine, Simulator
from pypto_serving.bench.traces import Trace, TraceRequest
from pypto_serving.engine.routing import Router
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import RequestOutput, StepStats


class VirtualReplica(Simulator):
    """Owns a scheduler with its own clock; tells the router what its requests do, named `index number`."""

    def __init__(self, trace: Trace, machine: Machine, router: Router, index: int) -> None:
        super().__init__(trace, machine)
        self._router, self._index, self._machine = router, index, machine
        self._num_outputs = 0

    @property
    def stats(self) -> StepStats:
        """What the router asks for."""
        prefill_per_s, decode_per_s = 1 / self._machine.token_s, 1 / self._machine.elapsed_s(1, 1)
        return StepStats(generation_tokens=self._num_outputs, prefill_per_s=prefill_per_s, decode_per_s=decode_per_s)

    @property
    def num_prompts(self) -> int:
        return len(self._records)

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were in the cache."""
        return sum(record.cached_tokens or 0 for record in self._records)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not hits."""
        return sum(record.prompt_tokens for record in self._records) - self.hit_tokens

    def admit(self, request: TraceRequest, links: Sequence[bytes]) -> None:
        self._router.add_requests(self._index, [f"{self._index} {len(self._records)}"], request.input_len, links)
        self._add(request)

    def advance(self, until_s: float) -> None:
        """Compute the steps that begin before `until_s`."""
        while self._now_s < until_s:
            self._scheduler.begin_turn(self._now_s)
            plan = self._scheduler.plan(self._now_s)
            if plan is None:
                break
            result = self._worker.run(plan)
            self._now_s += result.elapsed_s
            for output in self._scheduler.commit(result, self._now_s):
                self._take_output(output)
        if until_s < math.inf:
            self._now_s = max(self._now_s, until_s)

    def _take_output(self, output: RequestOutput) -> None:
        super()._take_output(output)
        self._num_outputs += 1
        name = f"{self._index} {output.request_id}"
        if output.finish_reason is None:
            self._router.begin_output(name)
        else:
            self._router.finish(name)


def serve(trace: Trace, machine: Machine, num_replicas: int) -> list[VirtualReplica]:
    """Serve a trace on replicas that together have the cache and the speed of `machine`."""
    each = replace(machine, device_tokens=machine.device_tokens // num_replicas, token_s=machine.token_s * num_replicas)
    router = Router(each.engine_config(trace.longest), num_replicas)
    replicas = [VirtualReplica(trace, each, router, index) for index in range(num_replicas)]
    for request in trace.requests:
        for replica in replicas:
            replica.advance(request.arrival_s)
        links = router.links(pack_ids(trace.token_ids(request, 0, PROMPT_VOCABULARY)), "")
        best, *_ = router.order(request.input_len, links, [replica.stats for replica in replicas])
        replicas[best].admit(request, links)
    for replica in replicas:
        replica.advance(math.inf)
    return replicas
