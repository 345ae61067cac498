"""All GPU tests and benchmarks in one call, each recorded in `eval/results/`: `python eval/gpu.py`.

    python eval/gpu.py --only tests,decode       # some parts
    python eval/gpu.py --quick --results /tmp/x  # smaller points, written elsewhere
    python eval/gpu.py --yardstick ../shared     # quality too: DIR/check/yardstick.py over DIR/models and DIR/data

Parts run in the order of `--help`, each in a process of its own, so that one which fails costs no other's result; the
exit code says how many failed. `python eval/tables.py` then makes the README's tables.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
QUALITY_METHODS = "fp,turbo,turbo:bits=mixed,turbo:bits=2,int8,turbo:softmax=sas"
Part = tuple[str, list[str]]


def bench(name: str, *options: str) -> list[str]:
    return ["python", "-m", "qattn_hf", "bench", name, "--json", *options]


def parts(options: list[str], yardstick: Path | None) -> dict[str, list[Part]]:
    """What each part records: names of results, with the commands that print their rows."""
    found = {
        "tests": [("gpu-tests", ["python", "eval/gpu_tests.py", "-n", "14", "--dist", "worksteal"])],
        "decode": [("speed-decode", bench("decode", *options))],
        "prefill": [("speed-prefill", bench("prefill", *options))],
        "generate": [("speed-generate", bench("generate", "--way", "all", *options))],
    }
    if yardstick is not None:
        found["quality"] = [quality(yardstick, model) for model in sorted((yardstick / "models").iterdir())]
    return found


def quality(yardstick: Path, model: Path) -> Part:
    """The full run of the yardstick over one model."""
    script, data = yardstick / "check" / "yardstick.py", yardstick / "data"
    command = ["python", str(script), str(model), str(data), "--methods", QUALITY_METHODS]
    return f"quality-full-{model.name}", command


def record(part: Part, results: Path) -> int:
    """Run and record one command; its exit code."""
    name, command = part
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    script = [sys.executable, "eval/record.py", name, "--results", str(results.resolve()), "--", *command]
    return subprocess.run(script, cwd=ROOT, env=environment).returncode


def main(arguments: list[str] | None = None) -> None:
    known = ("tests", "decode", "prefill", "generate", "quality")
    parser = argparse.ArgumentParser(description="Run all GPU tests and benchmarks and record their results.")
    parser.add_argument("--only", default="", help=f"some of {', '.join(known)}, comma between; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points in the benchmarks")
    parser.add_argument("--device", help="for the benchmarks, such as cpu; a GPU by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument(
        "--yardstick", type=Path, help="folder with check/yardstick.py, models/ and data/: part quality"
    )
    options = parser.parse_args(arguments)
    chosen = [name for name in options.only.split(",") if name]
    chosen = chosen or [name for name in known if name != "quality" or options.yardstick]
    if unknown := set(chosen) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(known)}")
    if "quality" in chosen and options.yardstick is None:
        parser.error("the part quality needs --yardstick DIR")

    given = [*(["--quick"] if options.quick else []), *(["--device", options.device] if options.device else [])]
    available = parts(given, options.yardstick.resolve() if options.yardstick else None)
    summary = []
    for name in (name for name in known if name in chosen):
        for part in available[name]:
            print(f"== {part[0]}", flush=True)
            began = time.perf_counter()
            code = record(part, options.results)
            verdict = "recorded" if code == 0 else f"FAILED ({code}), not recorded"
            summary.append((code, f"{part[0]}: {verdict}, {time.perf_counter() - began:.0f} s"))
    print("\n".join(["==", *(text for _, text in summary)]), flush=True)
    sys.exit(sum(code != 0 for code, _ in summary))


if __name__ == "__main__":
    main()
