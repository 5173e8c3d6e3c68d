"""Random sequences of calls and restarts, against a dictionary."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pypto_serving.store.disk import DiskStore
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, Place, key_of, listed, loads, put
from tests.thinning import examples

NUM_SLOTS = (5, 3)
PLACES = st.one_of(st.tuples(st.just(0), st.integers(0, 4)), st.tuples(st.just(1), st.integers(0, 2)))
KEYS = st.integers(0, 30)


class Sequences(RuleBasedStateMachine):
    """`held` is what the store must hold, least recently used first; keys are unique, as the core makes them."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.held: dict[Place, bytes] = {}
        self.num_slots = NUM_SLOTS
        self.store = self.open()

    def open(self) -> DiskStore:
        return DiskStore(Path(self.folder.name), FINGERPRINT, BLOCK_BYTES, self.num_slots, 1 << 30)

    def fits(self, place: Place) -> bool:
        return place[1] < self.num_slots[place[0]]

    @rule(pieces=st.dictionaries(PLACES, KEYS, min_size=1, max_size=4))
    def put(self, pieces: dict[Place, int]) -> None:
        new: dict[Place, bytes] = {}
        for place, number in pieces.items():
            key = key_of(number)
            elsewhere = any(held == key for other, held in (*self.held.items(), *new.items()) if other != place)
            if self.fits(place) and not elsewhere:
                new[place] = key
        assert put(self.store, new) == [True] * len(new)
        for place, key in new.items():
            self.held.pop(place, None)
            self.held[place] = key

    @rule(place=PLACES, key=KEYS)
    def load(self, place: Place, key: int) -> None:
        if self.fits(place):
            wanted = key_of(key)
            assert loads(self.store, place, wanted) == (self.held.get(place) == wanted)
            if self.held.get(place) == wanted:
                self.held[place] = self.held.pop(place)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def load_held(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))
        assert loads(self.store, place, self.held[place])
        self.held[place] = self.held.pop(place)

    @rule(num_slots=st.sampled_from([NUM_SLOTS, NUM_SLOTS, (3, 3), (5, 1), (0, 2)]))
    def restart(self, num_slots: tuple[int, int]) -> None:
        self.store.close()
        self.num_slots = num_slots
        self.held = {place: key for place, key in self.held.items() if self.fits(place)}
        self.store = self.open()

    @rule()
    def read_beside(self) -> None:
        reader = self.open()
        assert not reader.inventory().writable
        assert listed(reader).items() <= self.held.items()
        for place, key in listed(reader).items():
            assert loads(reader, place, key)
        reader.close()

    @invariant()
    def lists_what_is_held(self) -> None:
        if hasattr(self, "store"):
            assert list(listed(self.store).items()) == list(self.held.items())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


TestSequences = Sequences.TestCase
TestSequences.settings = examples(40, stateful_step_count=30)
