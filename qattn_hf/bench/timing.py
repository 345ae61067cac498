"""Timing of work on a device: by CUDA events, or by the host's clock on a CPU."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]
HEAD_START = 2_000_000  # clock cycles, about 1 ms, in which the host queues work before the device begins it


class Times(NamedTuple):
    """Milliseconds of a run, median, fastest and slowest, over `runs` runs."""

    median: float
    low: float
    high: float
    runs: int


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished. On a CPU this returns at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free the allocator's unused GPU memory, so that the next way's memory is counted alone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def capture(steps: Sequence[Work], device: torch.device) -> Work:
    """Capture all `steps` in one CUDA graph and return its replay. On a CPU, return a function that runs the steps.

    Each step must have run once: kernels must be compiled and loaded when the capture begins. The replay keeps the
    steps, because its graph reads the memory of their tensors.
    """
    if device.type != "cuda":
        return lambda: [step() for step in steps]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return partial(_replay, graph, steps)


def _replay(graph: torch.cuda.CUDAGraph, kept: Sequence[Work]) -> None:
    graph.replay()


def measure(
    run: Work, device: torch.device, prepare: Work = lambda: None, seconds: float = 0.1, least: int = 5, most: int = 30
) -> Times:
    """Time `run` repeatedly for about `seconds`, with an untimed `prepare` before each run.

    Args:
        least, most: bounds of the number of runs. On a CPU `least` is 1.
    """
    prepare()
    first = milliseconds(run, device)  # warms up, and tells how many runs fit
    least = least if device.type == "cuda" else 1  # figures of a CPU only show that the command works
    runs = min(most, max(least, int(seconds * 1e3 / max(first, 1e-3))))
    times = []
    for _ in range(runs):
        prepare()
        times.append(milliseconds(run, device))
    return Times(statistics.median(times), min(times), max(times), runs)


def milliseconds(run: Work, device: torch.device) -> float:
    """Return the milliseconds of one run on the device."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)  # otherwise the launch would count as device time
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def attempt(measurement: Callable[[], dict[str, Any]], ours: bool) -> dict[str, Any]:
    """Return the result of a measurement, or its `error`. One failing way thus keeps the figures of the others.

    Args:
        ours: whether to print an error with its traceback. A stock way may lack a kernel, which is expected.
    """
    try:
        return measurement()
    except Exception as error:  # of any library below; the caller's exit code reports it
        if ours:
            traceback.print_exc(limit=-3)
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def check_finite(out: torch.Tensor) -> None:
    """Check an output before it is timed.

    Raises:
        RuntimeError: a number in the output is not finite.
    """
    if not bool(out.isfinite().all()):
        raise RuntimeError("the output is not finite, so its time would be meaningless")


def working_sets(n_bytes: int, device: torch.device) -> int:
    """Return how many buffers of `n_bytes` a loop must cycle through so that none stays in the L2 cache; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return max(1, -(-2 * torch.cuda.get_device_properties(device).L2_cache_size // n_bytes))
