"""The waiting queue: order, deadlines, and what it keeps of requests that left it."""

from __future__ import annotations

import gc
import random

from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.sched.preemption import by_order
from pypto_serving.sched.queue import Deadlines, TokenShares, WaitingQueue
from pypto_serving.sched.request import Request
from pypto_serving.sched.step import Scheduled
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from tests.simulation import Simulation, null_config
from tests.thinning import examples


def waiting(arrival: int, priority: int = 0, deadline_s: float | None = None, salt: str = "") -> Request:
    source = EngineRequest(
        request_id=str(arrival),
        token_ids=pack_ids([1]),
        params=SamplingParams(),
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=salt,
    )
    return Request(source, arrival, 16)


def num_requests() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


def test_aborted_requests_of_low_priority_are_forgotten_at_once() -> None:
    simulation = Simulation(null_config(max_num_seqs=1))
    running, patient = (simulation.add([1, 2, 3], max_tokens=200) for _ in range(2))
    late = [simulation.add([4, 5, 6], priority=9, deadline_s=1e9) for _ in range(120)]
    simulation.turn()
    before = num_requests()
    simulation.abort(*late)
    simulation.turn()
    assert num_requests() == before - len(late)
    scheduler = simulation.core.scheduler
    heaps = [*scheduler._registry.waiting._by_salt.values(), scheduler._registry._deadlines._heap]
    assert len(scheduler._registry.waiting) == 1 and sum(len(heap._heap) for heap in heaps) < 50
    simulation.abort(running, patient)
    simulation.run()


class CountedShares(TokenShares):
    """Counts the requests that are compared."""

    compared = 0

    def rank(self, request: Request) -> tuple[int, int, int]:
        self.compared += 1
        return super().rank(request)


def test_with_fairness_only_the_first_requests_of_salts_are_compared() -> None:
    shares = CountedShares()
    queue = WaitingQueue(shares)
    for arrival in range(3000):
        request = waiting(arrival, salt="abc"[arrival % 3])
        shares.enter(request)
        queue.push(request)
    while (request := queue.peek()) is not None:
        queue.remove(request)
    assert shares.compared <= 3 * 3001 and not queue._by_salt


@examples(80)
@given(seed=st.integers(0, 10**6), fair=st.booleans())
def test_the_queue_agrees_with_a_sorted_list(seed: int, fair: bool) -> None:
    """Pushes, removals in any order, pushes of what was removed, tokens of salts, and deadlines."""
    rng, model, gone = random.Random(seed), dict[str, Request](), list[Request]()
    shares, deadlines, late = TokenShares(), Deadlines(), dict[str, Request]()
    queue = WaitingQueue(shares if fair else None)
    for arrival in range(rng.randrange(1, 120)):
        match rng.randrange(5):
            case 0 | 1:
                request = waiting(arrival, rng.randrange(3), rng.choice([None, rng.random()]), rng.choice("abc"))
                shares.enter(request)
                queue.push(request)
                deadlines.add(request)
                model[request.id] = late[request.id] = request
            case 2 if model:
                request = model.pop(rng.choice(list(model)))
                queue.remove(request)
                if rng.random() < 0.5:
                    deadlines.remove(late.pop(request.id, request))
                gone.append(request)
            case 3 if gone:
                request = gone.pop()
                queue.push(request)
                model[request.id] = request
            case 4:
                now_s = rng.random() * arrival / 120
                due = {r.id for r in late.values() if (d := r.source.deadline_s) is not None and d <= now_s}
                assert {request.id for request in deadlines.take_expired(now_s)} == due
                for request_id in due:
                    del late[request_id]
                for request in model.values():
                    shares.charge([Scheduled(request, 0, rng.randrange(9), 0, False)])
        rank = shares.rank if fair else by_order
        assert queue.peek() is min(model.values(), key=rank, default=None)
        assert {request.id for request in queue} == model.keys() and len(queue) == len(model)
