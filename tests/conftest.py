"""Without a GPU Triton's kernels run in its interpreter. Triton asks for that when it is imported, which other
libraries may do first, so it is settled before any test module."""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # test processes beside one another share out the GPUs
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    torch.cuda.set_device(int(worker) % torch.cuda.device_count())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every model can be captured, and CUDA graphs are `FakeGraphs`."""
    from fake_graphs import FakeGraphs

    from qattn_hf.cuda_graph import capture, graph

    found = FakeGraphs()
    monkeypatch.setattr(graph, "record", found.record)
    monkeypatch.setattr(capture, "why_not", lambda model: None)
    return found
