from __future__ import annotations

import math

import pytest
import torch

from qattn_kernels.chip import LIMIT


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
def whole_memory(monkeypatch: pytest.MonkeyPatch):
    """Programs have all shared memory of the GPU, whatever `QATTN_SHARED_KIB` says: the test asks what would run."""
    monkeypatch.delenv(LIMIT, raising=False)
