"""What tests of models on the fake device share."""

from __future__ import annotations

import pytest

from pypto_serving.kernels.cuda import attention


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a few tokens have several tiles and splits."""
    monkeypatch.setattr(attention, "SPLIT", 16)
    monkeypatch.setattr(attention, "TILE", 16)
