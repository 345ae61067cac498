"""Compare decode and prefill speed of another checkout with this one: `python eval/compare_trees.py ../before`.

    git worktree add ../before COMMIT
    python eval/compare_trees.py ../before
    python eval/compare_trees.py ../before --bench decode --methods turbo,int8 --points 1x512,64x512    # a part of it

The other checkout is measured first, and its first method again at the end, to show whether the machine changed in
between. All kernels are compiled, in parallel, before the timing. Each measurement prints a JSON row of `qattn bench`
with its `tree` (`before`, `after`) and `pass`. The ratio of each pair follows as text. Methods that the other checkout
lacks are measured only in this one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qattn_hf import list_methods
from qattn_hf.methods import measured_settings
from qattn_hf.recipes.spelling import split_method, split_methods

ROOT = Path(__file__).resolve().parent.parent
POINTS = {
    "decode": "16x32768,64x4096,16x4096,1x32768,1x131072",
    "prefill": "16x1024,4x4096,1x16384,1x32768",
}
METHODS = {bench: measured_settings(bench) + measured_settings(f"trees-{bench}") for bench in ("decode", "prefill")}
# Runs with either checkout on the path, so it uses only names that both have: before and after modules were renamed.
WORKER = """
import json, sys
from functools import partial
import torch
from qattn_hf.bench import decode, prefill, timing
from qattn_hf.bench.layers import Heads
from qattn_hf import list_methods
from qattn_hf.compare import find_recipe
job = json.loads(sys.argv[1])
bench = {"decode": decode, "prefill": prefill}[job["bench"]]
packed = getattr(bench, "packed", None) or bench._packed
if job["warm"]:
    bench.measure = lambda *args, **kwargs: timing.Times(1.0, 1.0, 1.0, 1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
heads = Heads() if device.type == "cuda" else Heads(4, 2, 32, torch.float32)
settling = 4 if device.type == "cuda" and not job["warm"] else 0  # as in `bench.decode.SETTLING`
for way, method, settings in job["methods"]:
    if method not in list_methods():
        continue
    settings = find_recipe(method, None, settings).settings
    for point in (bench.Point(*point) for point in job["points"]):
        while settling > 0:
            timing.attempt(partial(packed, point, settings, heads, device), ours=True)
            settling -= 1
        figures = timing.attempt(partial(packed, point, settings, heads, device), ours=True)
        print(json.dumps({"bench": job["bench"], **point._asdict(), **heads.row(), "way": way, **figures}), flush=True)
        timing.release(device)
"""


def points_of(text: str) -> list[tuple[int, int]]:
    """Rows and context length, or prompt length, of each point of `1x512,64x512`.

    Raises:
        argparse.ArgumentTypeError: another text.
    """
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rows x tokens, as 1x512,64x512")
    return [(int(rows), int(tokens)) for rows, tokens in (point.split("x") for point in text.split(","))]


def measured(
    tree: Path, bench: str, methods: list[str], points: list[tuple[int, int]], warm: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of one bench, measured in a process with one checkout on its path.

    Args:
        points: see `points_of`.

    Raises:
        RuntimeError: if that process fails.
    """
    path = os.pathsep.join([str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")])
    spelled = [(text, *split_method(text)) for text in methods]
    job = {"bench": bench, "methods": spelled, "points": points, "warm": warm}
    command = [sys.executable, "-c", WORKER, json.dumps(job)]
    with subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"{bench} of {tree.name} failed")


Times = dict[tuple[Any, ...], dict[int, float]]  # ms by bench, method and point, then by pass


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of another checkout and of this one, in one run.")
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--bench", choices=METHODS, help="only this bench; both by default")
    parser.add_argument("--methods", help="methods with settings, commas between; by default those of each bench")
    parser.add_argument(
        "--points", type=points_of, help="rows x tokens, as 1x512,64x512; by default those of each bench"
    )
    options = parser.parse_args(arguments)
    options.methods = split_methods([options.methods]) if options.methods else None
    if unknown := {split_method(text)[0] for text in options.methods or ()} - set(list_methods()):
        parser.error(f"--methods {', '.join(sorted(unknown))}: there are {', '.join(list_methods())}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = _parsed(arguments)
    other, named = options.other.resolve(), options.methods
    benches = {name: list(named or methods) for name, methods in METHODS.items() if options.bench in (None, name)}
    points = {name: options.points or points_of(POINTS[name]) for name in benches}
    jobs = [(tree, bench, [name]) for tree in (other, ROOT) for bench, names in benches.items() for name in names]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for rows in [pool.submit(list, measured(*job, points[job[1]], warm=True)) for job in jobs]:
            rows.result()
    times: Times = {}
    for number, (tree, name) in enumerate(((other, "before"), (ROOT, "after"), (other, "before"))):
        for bench, methods in benches.items():
            for row in measured(tree, bench, methods[:1] if number == 2 else methods, points[bench]):
                print(json.dumps({**row, "tree": name, "pass": number}), flush=True)
                place = (bench, row["way"], row["batch"], row.get("context") or row.get("tokens"))
                times.setdefault(place, {})[number] = row.get("ms", float("nan"))
    _print_ratios(times)


def _print_ratios(times: Times) -> None:
    """A line for each bench, method and point that both checkouts measured."""
    for (bench, way, batch, tokens), ms in times.items():
        if len(ms) > 1:
            print(f"# {bench} {way} {batch}x{tokens}: {ms[0]:.4f} ms, now {ms[1]:.4f}: {ms[0] / ms[1]:.3f}x", end="")
            print(f", and once more {ms[2]:.4f}" if 2 in ms else "")


if __name__ == "__main__":
    main()
