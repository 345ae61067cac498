"""All GPU tests and benchmarks in one call, each recorded in `eval/results/`: `python eval/gpu.py`.

    python eval/gpu.py --only tests,decode       # some parts
    python eval/gpu.py --quick --results /tmp/x  # smaller points, written elsewhere
    python eval/gpu.py --yardstick ../shared     # recipes, quality, tasks too: DIR/check/yardstick.py, models, data
    python eval/gpu.py --only quality --families sinkq --yardstick ../shared

Each measurement runs in a process of its own, so that one which fails costs no other's result; the exit code says how
many failed. Those that time nothing (tests, recipes, quality) run side by side, those that do one after another when
the GPU is theirs. Tasks need lm-eval (extra `eval`). `python eval/tables.py` then makes the README's tables.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# Settings whose quality is recorded: a result for each family and model, so that a new method needs no run of all.
QUALITY_METHODS = {
    "8bit": "fp,int8,fp8",
    "kivi": "kivi:bits=4,kivi:bits=2,kivi:bits=2,group_size=128,residual_length=32",
    "turbo": "turbo,turbo:bits=mixed,turbo:bits=2,turbo:softmax=sas",
    "sinkq": "sinkq,sinkq:sink_skip_layers=0",
    "turbo_sink": "turbo:sink_num=3,sink_window=8,turbo:bits=mixed,sink_num=3,sink_window=8",
    "sage2": "sage2,sage2:bits=4,sage2:bits=4,smooth_q=none,sage2:bits=4,smooth_k=false,sage2:version=1",
    "turboquant": (
        "turboquant,turboquant:k_format=turbo4,turboquant:k_format=q4,v_format=q4,"
        "turboquant:k_format=turbo3,v_format=turbo3,turboquant:k_format=turbo2,v_format=turbo2"
    ),
    "int_flash": "int_flash,int_flash:mode=half,int_flash:bits=4,int_flash:bits=4,rotate=hadamard",
}
DECODE_METHODS = (
    "turbo",
    "int8",
    "fp8",
    "int_flash",
    "none",
    "kivi:bits=4,group_size=128",
    "kivi:bits=2,group_size=128,residual_length=32",
    "sinkq",
    "turbo:sink_num=3",
    "turboquant",
    "turboquant:k_format=turbo4",
    "turboquant:k_format=turbo3,v_format=turbo3",
    "sage2",
    "sage2:bits=4",
)
PREFILL_METHODS = ("turbo", "int8", "none", "int_flash", "turboquant", "sinkq", "sage2", "sage2:bits=4")
TASKS = ("sums", "recall_10", "recall_40", "recall_100", "qattn_wikitext")  # each read through the packed cache
TASK_METHODS = (
    "full",
    "int8",
    "fp8",
    "int_flash",
    "sage2",
    "kivi:bits=4",
    "kivi:bits=2,group_size=128,residual_length=32",
    "sinkq",
    "turbo",
    "turbo:bits=mixed",
    "turbo:v_bits=2,sink_num=3,sink_window=8",
    "turboquant",
    "turboquant:k_format=turbo4",
)
UNTIMED = ("tests", "recipes", "quality", "tasks")
TEST_PROCESSES = max(1, (os.cpu_count() or 1) * 7 // 8)  # most of their time is the compiler's
Part = tuple[str, list[str]]


def bench(name: str, *options: str) -> list[str]:
    return ["python", "-m", "qattn_hf", "bench", name, "--json", *options]


def parts(options: list[str], yardstick: Path | None, families: list[str]) -> dict[str, list[Part]]:
    """What each part records: names of results, with the commands that print their rows."""
    methods, prefilled = (
        [text for method in found for text in ("--method", method)] for found in (DECODE_METHODS, PREFILL_METHODS)
    )
    found = {
        "tests": [("gpu-tests", ["python", "eval/gpu_tests.py", "-n", str(TEST_PROCESSES), "--dist", "worksteal"])],
        "decode": [("speed-decode", bench("decode", *methods, *options))],
        "prefill": [("speed-prefill", bench("prefill", *prefilled, *options))],
        "generate": [("speed-generate", bench("generate", "--way", "all", *options))],
    }
    if yardstick is not None:
        models = sorted(path for path in (yardstick / "models").iterdir() if path.is_dir())
        found["recipes"] = [("recipes", ["python", "eval/recipes.py", str(yardstick)])]
        found["tasks"] = [tasks(yardstick, model) for model in models]
        found["quality"] = [quality(yardstick, model, family) for family in families for model in models]
    return found


def quality(yardstick: Path, model: Path, family: str) -> Part:
    """The full run of the yardstick over one model, for one family of settings."""
    script, data = yardstick / "check" / "yardstick.py", yardstick / "data"
    command = ["python", str(script), str(model), str(data), "--methods", QUALITY_METHODS[family]]
    return f"quality-full-{model.name}-{family}", command


def tasks(yardstick: Path, model: Path) -> Part:
    """Tasks that the small models were trained for, and perplexity, through lm-eval and the packed cache."""
    chosen = [text for name in TASKS for text in ("--task", name)]
    chosen += [text for name in TASK_METHODS for text in ("--method", name)]
    data = ["--data-dir", str(yardstick / "data"), "--dtype", "float32", "--batch-size", "50"]
    return f"tasks-{model.name}", [
        "python", "-m", "qattn_hf", "eval", "--json", "--model", str(model), *data, *chosen
    ]  # fmt: skip


def record(part: Part, results: Path) -> tuple[int, str]:
    """Run and record one command; its exit code, and a line on how it went."""
    name, command = part
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    script = [sys.executable, "eval/record.py", name, "--results", str(results.resolve()), "--", *command]
    code = subprocess.run(script, cwd=ROOT, env=environment).returncode
    verdict = "recorded" if code == 0 else f"FAILED ({code}), not recorded"
    return code, f"{name}: {verdict}, {time.perf_counter() - began:.0f} s"


def main(arguments: list[str] | None = None) -> None:
    known = ("tests", "decode", "prefill", "generate", "recipes", "quality", "tasks")
    parser = argparse.ArgumentParser(description="Run all GPU tests and benchmarks and record their results.")
    parser.add_argument("--only", default="", help=f"some of {', '.join(known)}, comma between; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points in the benchmarks")
    parser.add_argument("--device", help="for the benchmarks, such as cpu; a GPU by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument(
        "--yardstick", type=Path, help="folder with check/yardstick.py, models/ and data/: part quality"
    )
    parser.add_argument(
        "--families", default=",".join(QUALITY_METHODS), help=f"of quality: some of {', '.join(QUALITY_METHODS)}"
    )
    options = parser.parse_args(arguments)
    families = options.families.split(",")
    if strange := set(families) - set(QUALITY_METHODS):
        parser.error(f"--families {', '.join(sorted(strange))}: there are {', '.join(QUALITY_METHODS)}")
    chosen = [name for name in options.only.split(",") if name]
    asking = {"recipes", "quality", "tasks"}  # for the yardstick
    chosen = chosen or [name for name in known if name not in asking or options.yardstick]
    if unknown := set(chosen) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(known)}")
    if options.yardstick is None and (needy := asking & set(chosen)):
        parser.error(f"the part {min(needy)} needs --yardstick DIR")

    given = [*(["--quick"] if options.quick else []), *(["--device", options.device] if options.device else [])]
    available = parts(given, options.yardstick.absolute() if options.yardstick else None, families)
    chosen_parts = {name: available[name] for name in known if name in chosen}
    side_by_side = [part for name in UNTIMED for part in chosen_parts.pop(name, [])]
    with ThreadPoolExecutor(max(1, len(side_by_side))) as pool:
        summary = list(pool.map(lambda part: record(part, options.results), side_by_side))
    summary += [record(part, options.results) for group in chosen_parts.values() for part in group]
    print("\n".join(["==", *(text for _, text in summary)]), flush=True)
    sys.exit(sum(code != 0 for code, _ in summary))


if __name__ == "__main__":
    main()
