from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from qattn_kernels.chip import H200, LIMIT, as_chip


@pytest.fixture
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """What a kernel does not write is NaN, in E4M3 too, or the number that a test gives this fixture as parameter."""
    filling = getattr(request, "param", math.nan)

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            if x.dtype == torch.uint8:
                return x.fill_(0x7F)
            return x.fill_(filling) if x.is_floating_point() else x

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def as_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ask what an H200 would run, whatever GPU is here and whatever `QATTN_SHARED_KIB` says."""
    monkeypatch.delenv(LIMIT, raising=False)
    with as_chip(H200):
        yield
