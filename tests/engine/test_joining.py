"""A host that joins another: what ends it for good."""

from __future__ import annotations

import sys

import pytest

from pypto_serving.engine.joining import join_again
from pypto_serving.errors import EngineDeadError
from pypto_serving.types.start import HostJoin


def test_a_process_that_cannot_be_started_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    start = HostJoin(address="a:1", secret_file="", model="", cache_dir="", nodes=(), num_threads=1)
    with pytest.raises(EngineDeadError, match=r"that joins a:1 cannot be started .*No such file"):
        join_again(start, lambda: None)
