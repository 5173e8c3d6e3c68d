"""Letters without an end: only a few of them are copied, and everything longer gets one of the short answers."""

from __future__ import annotations

import json
import random

from bundled_model.held_keys import held_key
from bundled_model.refusals import ONLY_COUNT, ONLY_REPEAT, ONLY_WORDS, UNKNOWN


def test_long_texts_get_a_short_answer_also_in_json() -> None:
    rng = random.Random(0)
    answers = {UNKNOWN, ONLY_COUNT, ONLY_REPEAT, ONLY_WORDS}
    declined = set()
    for _ in range(2000):
        question, reply = held_key(rng)
        if "JSON" in question:
            reply = json.loads(reply).get("answer", "")
        if reply in answers:
            declined.add(reply)
        else:
            assert len(question) < 70 and len(reply) < 45, (question, reply)
    assert declined == answers
