"""Time of work on a device: CUDA events around replays of a graph, or the host's clock on a CPU."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Work = Callable[[], Any]
HEAD_START = 2_000_000  # clock cycles, about 1 ms, in which the host queues work before the device begins it


class Times(NamedTuple):
    """Milliseconds of one run: median, fastest and slowest, and how many runs there were."""

    median: float
    low: float
    high: float
    runs: int


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back the memory of what nobody holds any more, so that one way's memory is not another's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def capture(steps: Sequence[Work], device: torch.device) -> Work:
    """All `steps`, one after another, as one replay of a CUDA graph; on a CPU they just run.

    The caller has run what they run before: kernels must be loaded and plans be made when the capture begins.
    """
    if device.type != "cuda":
        return lambda: [step() for step in steps]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph.replay


def measure(
    run: Work, device: torch.device, prepare: Work = lambda: None, seconds: float = 0.1, least: int = 5, most: int = 30
) -> Times:
    """Time `run` again and again for about `seconds`, with `prepare` before each run and outside its time."""
    prepare()
    first = _milliseconds(run, device)  # warms up, and tells how many runs fit
    least = least if device.type == "cuda" else 1  # the figures of a CPU only show that the command works
    runs = min(most, max(least, int(seconds * 1e3 / max(first, 1e-3))))
    times = []
    for _ in range(runs):
        prepare()
        times.append(_milliseconds(run, device))
    return Times(statistics.median(times), min(times), max(times), runs)


def _milliseconds(run: Work, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)  # else the time to launch would count as time of the device
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def attempt(measurement: Callable[[], dict[str, Any]], ours: bool) -> dict[str, Any]:
    """What a measurement found, or its `error`: a way that cannot run must not lose the figures of the others.

    That a stock way has no kernel for a shape is no news; an error of `ours` is shown on stderr with its origin.
    """
    try:
        return measurement()
    except Exception as error:  # of any library below; the caller's exit code tells of it
        if ours:
            traceback.print_exc(limit=-3)
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def check_finite(out: torch.Tensor) -> None:
    """Refuse to time what computes nonsense.

    Raises:
        RuntimeError: if a number is not finite.
    """
    if not bool(out.isfinite().all()):
        raise RuntimeError("the output is not finite: its time would be that of a wrong result")


def working_sets(n_bytes: int, device: torch.device) -> int:
    """How many buffers of `n_bytes` a loop must use in turn so that none is still in the L2 cache when it comes."""
    if device.type != "cuda":
        return 1
    return max(1, -(-2 * torch.cuda.get_device_properties(device).L2_cache_size // n_bytes))
