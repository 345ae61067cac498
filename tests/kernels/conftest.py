from __future__ import annotations

import math

import pytest
import torch


@pytest.fixture
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """What a kernel does not write is NaN, or the number that a test gives this fixture as parameter."""
    filling = getattr(request, "param", math.nan)

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(filling) if x.is_floating_point() else x

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
