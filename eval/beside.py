"""Decode and prefill of another checkout and of this one in one run: `python eval/beside.py ../before`.

    git worktree add ../before COMMIT
    python eval/record.py speed-before-after -- python eval/beside.py ../before

The other checkout is measured first, and its first method once more at the end, so that a machine which changes
meanwhile shows itself. Kernels are compiled before anything is timed, side by side. Prints one JSON row a measurement:
that of `qattn bench`, the `tree` it is of, and in which `pass`; at the end, for people, the ratio of each pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qattn_hf.methods import measured_settings

ROOT = Path(__file__).resolve().parent.parent
DECODE_POINTS = [(16, 32768), (64, 4096), (16, 4096), (1, 32768), (1, 131072)]
METHODS = {bench: measured_settings(bench) + measured_settings(f"beside-{bench}") for bench in ("decode", "prefill")}
WORKER = """
import json, sys
from functools import partial
from qattn_hf.bench import decode, prefill, timing
from qattn_hf.cli.bench import chosen_device, chosen_methods, parse_heads
asked = json.loads(sys.argv[1])
bench = {"decode": decode, "prefill": prefill}[asked["bench"]]
if asked["warm"]:
    bench.measure = lambda *args, **kwargs: timing.Times(1.0, 1.0, 1.0, 1)
device = chosen_device(None)
heads = parse_heads(None, device)
for name, settings in chosen_methods(asked["methods"]).items():
    for point in (bench.Point(*point) for point in asked["points"]):
        found = timing.attempt(partial(bench._packed, point, settings, heads, device), ours=True)
        print(json.dumps({"bench": asked["bench"], **point._asdict(), **heads.row(), "way": name, **found}), flush=True)
        timing.release(device)
"""


def points(bench: str, quick: bool) -> list[tuple[int, int]]:
    """Rows, and cached or prompt tokens of each."""
    if quick:
        return [(1, 96)]
    return DECODE_POINTS if bench == "decode" else [(16, 1024), (4, 4096), (1, 16384), (1, 32768)]


def measured(tree: Path, bench: str, methods: list[str], quick: bool, warm: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of one bench of one checkout, in a process of its own.

    Raises:
        RuntimeError: if that process fails.
    """
    path = os.pathsep.join([str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")])
    asked = {"bench": bench, "methods": methods, "points": points(bench, quick), "warm": warm}
    command = [sys.executable, "-c", WORKER, json.dumps(asked)]
    with subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"{bench} of {tree.name} failed")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill of another checkout and of this one, in one run.")
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--quick", action="store_true", help="one small point")
    options = parser.parse_args(arguments)
    other = options.other.resolve()
    jobs = [(tree, bench, [name]) for tree in (other, ROOT) for bench, names in METHODS.items() for name in names]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        compiled = [pool.submit(list, measured(*job, options.quick, warm=True)) for job in jobs]
        assert all(rows.result() for rows in compiled)
    times: dict[tuple[Any, ...], list[float]] = {}
    for turn, (tree, name) in enumerate(((other, "before"), (ROOT, "after"), (other, "before"))):
        for bench, methods in METHODS.items():
            for row in measured(tree, bench, list(methods[:1] if turn == 2 else methods), options.quick):
                print(json.dumps({**row, "tree": name, "pass": turn}), flush=True)
                place = (bench, row["way"], row["batch"], row.get("context") or row.get("tokens"))
                times.setdefault(place, []).append(row.get("ms", float("nan")))
    for (bench, way, batch, tokens), (before, after, *again) in times.items():
        print(f"# {bench} {way} {batch}x{tokens}: {before:.4f} ms, now {after:.4f}: {before / after:.3f}x", end="")
        print(*(f", and once more {ms:.4f}" for ms in again))


if __name__ == "__main__":
    main()
