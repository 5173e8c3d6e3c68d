"""The waiting queue: order, deadlines, and what it keeps of requests that left it."""

from __future__ import annotations

import gc
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pypto_serving.sched.queue import WaitingQueue
from pypto_serving.sched.request import Request
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tokens import pack_ids
from tests.simulation import Simulation, null_config


def waiting(arrival: int, priority: int = 0, deadline_s: float | None = None) -> Request:
    source = EngineRequest(
        request_id=str(arrival),
        token_ids=pack_ids([1]),
        params=SamplingParams(),
        priority=priority,
        deadline_s=deadline_s,
    )
    return Request(source, arrival, 16)


def num_requests() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


def test_aborted_requests_of_low_priority_are_forgotten_at_once() -> None:
    simulation = Simulation(null_config(max_num_seqs=1))
    running, patient = (simulation.add([1, 2, 3], max_tokens=200) for _ in range(2))
    late = [simulation.add([4, 5, 6], priority=9, deadline_s=1e9) for _ in range(500)]
    simulation.turn()
    before = num_requests()
    simulation.abort(*late)
    simulation.turn()
    assert num_requests() == before - len(late)
    queue = simulation.core.scheduler._waiting
    assert len(queue) == 1 and len(queue._heap) + len(queue._deadlines) < 50
    simulation.abort(running, patient)
    simulation.run()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_queue_agrees_with_a_sorted_list(seed: int) -> None:
    """Pushes, removals in any order, pushes of what was removed, and deadlines."""
    rng, queue, model, gone = random.Random(seed), WaitingQueue(), dict[str, Request](), list[Request]()
    for arrival in range(rng.randrange(1, 120)):
        match rng.randrange(5):
            case 0 | 1:
                request = waiting(arrival, rng.randrange(3), rng.choice([None, rng.random()]))
                queue.push(request)
                model[request.id] = request
            case 2 if model:
                request = model.pop(rng.choice(list(model)))
                queue.remove(request)
                gone.append(request)
            case 3 if gone:
                request = gone.pop()
                request.life += rng.randrange(2)
                queue.push(request)
                model[request.id] = request
            case 4:
                now_s = rng.random() * arrival / 120
                due = {
                    r.id
                    for r in model.values()
                    if r.life == 0 and r.source.deadline_s is not None and r.source.deadline_s <= now_s
                }
                assert {request.id for request in queue.take_expired(now_s)} == due
                for request_id in due:
                    del model[request_id]
        assert queue.peek() is min(model.values(), key=lambda request: request.order, default=None)
        assert {request.id for request in queue} == model.keys() and len(queue) == len(model)
