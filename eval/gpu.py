"""Run all GPU tests and benchmarks, and record each in `eval/results/`: `python eval/gpu.py`.

    python eval/gpu.py --only tests,decode       # some parts
    python eval/gpu.py --quick --results /tmp/x  # smaller points, written elsewhere
    python eval/gpu.py --yardstick ../shared     # trained models as well: DIR/check/yardstick.py, models, data
    python eval/gpu.py --only quality,tasks --families sinkq --yardstick ../shared

Each measurement runs in a separate process, so that a failure costs no other result. The exit code is the number of
failures. Measurements of trained models take no times, so they run side by side on all GPUs. Tests and benchmarks
follow one after another, because some need most of a GPU's memory and others its time. Tasks need lm-eval (extra
`eval`). `python eval/tables.py` then makes the tables of README and docs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gpu_parts import RESULTS, Part, families, parts

ROOT = Path(__file__).resolve().parent.parent
KNOWN = (
    "tests",
    "released",
    "recipes",
    "quality",
    "tasks",
    "tables",
    "tune",
    "decode",
    "prefill",
    "front",
    "generate",
    "throughput",
    "requests",
    "first-call",
)
TRAINED = KNOWN[1:7]  # what trained models show: they need the yardstick's folder


def record(part: Part, results: Path, gpu: int | None = None) -> tuple[int, str]:
    """Run and record one command, on one GPU if it is given; its exit code, and a line on how it went."""
    name, command = part
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    kept = ["--failed"] if name == "gpu-tests" else []  # its rows say which tests failed
    script = [sys.executable, "eval/record.py", name, "--results", str(results.resolve()), *kept, "--", *command]
    code = subprocess.run(script, cwd=ROOT, env=environment).returncode
    verdict = "recorded" if code == 0 else f"FAILED ({code})" + ("" if kept else ", not recorded")
    return code, f"{name}: {verdict}, {time.perf_counter() - began:.0f} s"


def run(chosen: dict[str, list[Part]], results: Path) -> list[tuple[int, str]]:
    """Run all parts: measurements of trained models side by side, one per core, then the others one by one."""
    gpus = torch.cuda.device_count()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        begun = []
        for name in (name for name in chosen if name in TRAINED):
            for i, part in enumerate(chosen[name]):
                gpu = None if gpus < 2 or name == "recipes" else i % gpus  # which spreads itself over all of them
                begun.append(pool.submit(record, part, results, gpu))
        summary = [part.result() for part in begun]
    return summary + [record(part, results) for name in chosen if name not in TRAINED for part in chosen[name]]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all GPU tests and benchmarks and record their results.")
    parser.add_argument("--only", default="", help=f"some of {', '.join(KNOWN)}, comma between; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points in the benchmarks")
    parser.add_argument("--device", help="for the benchmarks, such as cpu; a GPU by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument(
        "--yardstick", type=Path, help=f"folder with check/yardstick.py, models/ and data/, for {', '.join(TRAINED)}"
    )
    every = ", ".join(families())
    parser.add_argument(
        "--families", default=every.replace(" ", ""), help=f"records of quality and tasks: some of {every}"
    )
    options = parser.parse_args(arguments)
    options.families = options.families.split(",")
    if strange := set(options.families) - set(families()):
        parser.error(f"--families {', '.join(sorted(strange))}: there are {every}")
    chosen = [name for name in options.only.split(",") if name]
    options.only = chosen or [name for name in KNOWN if name not in TRAINED or options.yardstick]
    if unknown := set(options.only) - set(KNOWN):
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(KNOWN)}")
    if options.yardstick is None and (needy := [name for name in TRAINED if name in options.only]):
        parser.error(f"the part {needy[0]} needs --yardstick DIR")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    given = [*(["--quick"] if options.quick else []), *(["--device", options.device] if options.device else [])]
    yardstick = options.yardstick.absolute() if options.yardstick else None
    with tempfile.TemporaryDirectory() as kept:
        available = parts(given, yardstick, options.families, Path(kept))
        summary = run({name: available[name] for name in KNOWN if name in options.only}, options.results)
    print("\n".join(["==", *(text for _, text in summary)]), flush=True)
    sys.exit(sum(code != 0 for code, _ in summary))


if __name__ == "__main__":
    main()
