"""Weighted fair queueing: whose work is next."""

from __future__ import annotations

from collections import Counter

import pytest

from pypto_serving import fair_queue
from pypto_serving.fair_queue import FairQueue


def test_the_key_that_used_the_least_is_next_and_the_oldest_among_equals() -> None:
    queue = FairQueue[str, str]()
    for item in ("a0", "b0", "a1", "c0"):
        queue.push(item[0], item)
    order = []
    for used_s in (0.1, 0.5, 0.0, 0.0):
        item = queue.pop()
        assert item is not None
        order.append(item)
        queue.charge(item[0], used_s)
    assert order == ["a0", "b0", "c0", "a1"] and not queue and queue.pop() is None


def test_a_key_with_little_work_waits_for_one_item_however_many_others_there_are() -> None:
    """Forty keys take fifty times as long. It comes back while one of them works, and is next; they share the rest."""
    queue, used, waited = FairQueue[int, int](lambda key: 0.0001 if key == 0 else 0.005), Counter[int](), 0
    good, others = 0, range(1, 41)
    for key in (*others, good):
        queue.push(key, key)
    is_waiting = True
    for _ in range(4000):
        key = queue.pop()
        assert key is not None
        used[key] += 1
        queue.charge(key, 0.0001 if key == good else 0.005)
        if key == good:
            is_waiting, waited = False, 0
            continue
        queue.push(key, key)
        waited += is_waiting
        assert waited <= 1 or used[good] == 0
        if not is_waiting:
            queue.push(good, good)
            is_waiting = True
    assert max(used[key] for key in others) - min(used[key] for key in others) <= 1 and used[good] > 1000


def test_idleness_earns_no_claim() -> None:
    queue = FairQueue[str, str]()
    for _ in range(10):
        queue.push("busy", "busy")
        assert queue.pop() == "busy"
        queue.charge("busy", 1.0)
    queue.push("busy", "busy")
    for _ in range(3):
        queue.push("late", "late")
    order = []
    while (item := queue.pop()) is not None:
        order.append(item)
        queue.charge(item, 1.0)
    assert order == ["late", "busy", "late", "late"]


def test_items_can_be_taken_back() -> None:
    queue = FairQueue[str, int]()
    for item in (1, 2, 3):
        queue.push("a", item)
    queue.push("b", 4)
    assert queue.remove("a", 2) and not queue.remove("a", 2) and not queue.remove("c", 1)
    assert queue.pop_longest() == 3 and len(queue) == 2
    assert [queue.pop(), queue.pop(), queue.pop()] == [1, 4, None]


def test_few_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_KEYS", 10)
    queue = FairQueue[int, int]()
    for host in range(100):
        queue.push(host, host)
        assert queue.pop() == host
        queue.charge(host, 1.0 if host == 5 else 0.0)
    assert 5 in queue._used_s and len(queue._used_s) <= 11
