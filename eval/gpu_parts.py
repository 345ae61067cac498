"""What `eval/gpu.py` measures: the command of each part, with the settings that methods call worth measuring."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints import CHECKPOINTS
from overview_table import DECODES, FRONT, PREFILLS

from qattn_hf.methods import measured, measured_settings
from qattn_hf.recipes.spelling import split_methods

RESULTS = Path(__file__).resolve().parent / "results"
FULL_PRECISION = "8bit"  # the record of quality and tasks that holds full precision itself, once for all
TASKS = ("sums", "recall_10", "recall_40", "recall_100", "qattn_wikitext")  # each read through the packed cache
TUNED_BITS = "3.25"
FIRST_CALLS = ("turbo", "int8", "sage2", "turbo:bits=mixed", "sinkq")  # from the fewest to the most kernels
TEST_PROCESSES = max(1, (os.cpu_count() or 1) * 7 // 8)  # most of their time is the compiler's
# Shapes of requests: memory of their caches, requests, and tokens of a forward. Stock pages compute gpt-oss' attention
# eagerly, so that the scores of a forward of 8,192 tokens take 48 GiB.
WINDOWED = {"gemma-3-4b": ("2GiB", "24", "8192"), "gpt-oss-20b-12-layers": ("512MiB", "64", "512")}
Part = tuple[str, list[str]]


def families() -> dict[str, str]:
    """Return the settings whose quality is recorded, comma-separated, by record.

    Each method or group of settings has a record, so that a new method does not need all runs again.
    """
    found: dict[str, list[str]] = {FULL_PRECISION: ["fp"]}
    for one in measured("quality"):
        found.setdefault(one.record or one.setting.partition(":")[0], []).append(one.setting)
    return {record: ",".join(settings) for record, settings in found.items()}


def windowed(shape: str, options: list[str]) -> Part:
    """Requests of a model with windows, which are unquantized in one run and packed in the other."""
    methods = [text for setting in ("turbo", "turbo:sliding=packed") for text in ("--method", setting)]
    memory, requests, batch_tokens = WINDOWED[shape]
    model = [f"eval/shapes/{shape}.json", "--random-weights", "--kv-memory", memory]
    load = ["--requests", requests, "--longest", "4096", "--batch-tokens", batch_tokens]
    return f"speed-requests-{shape}", bench("requests", *model, *load, *methods, *options)


def bench(name: str, *options: str) -> list[str]:
    return ["python", "-m", "qattn_hf", "bench", name, "--json", *options]


def parts(options: list[str], yardstick: Path | None, chosen: list[str], kept: Path) -> dict[str, list[Part]]:
    """Return the records of each part, or the runs of one record, with the commands that print their rows.

    Args:
        chosen: some of `families()`.
        kept: a folder for files that commands read.
    """
    methods, prefilled = (
        [text for setting in measured_settings(purpose) for text in ("--method", setting)]
        for purpose in ("decode", "prefill")
    )
    first_calls = [text for setting in FIRST_CALLS for text in ("--method", setting)]
    found = {
        "tests": [("gpu-tests", ["python", "eval/gpu_tests.py", "-n", str(TEST_PROCESSES)])],
        "decode": [("speed-decode", bench("decode", *methods, *options))],
        "prefill": [("speed-prefill", bench("prefill", *prefilled, *options))],
        "generate": [("speed-generate", bench("generate", "--way", "all", *options))],
        "throughput": [("speed-throughput", bench("throughput", *options))],
        "requests": [
            ("speed-requests", bench("requests", *options)),
            *(windowed(shape, options) for shape in WINDOWED),
        ],
        "first-call": [("speed-first-call", bench("first-call", *first_calls))],
    }
    found |= {"front": [front(name, options) for name in ("decode", "prefill")]}
    return found if yardstick is None else found | of_yardstick(yardstick, chosen, kept)


def of_yardstick(yardstick: Path, chosen: list[str], kept: Path) -> dict[str, list[Part]]:
    """The parts that read models and data of the yardstick's folder."""
    models = sorted(path for path in (yardstick / "models").iterdir() if path.is_dir())
    pairs = [(family, model) for family in chosen for model in models]
    first, _ = halves(yardstick, kept)
    return {
        "released": [released(yardstick, name) for name in CHECKPOINTS],
        "recipes": [("recipes", ["python", "eval/recipes.py", str(yardstick)])],
        "quality": [quality(yardstick, model, family) for family, model in pairs],
        "tasks": [tasks(yardstick, model, family) for family, model in pairs],
        "tables": [paper(yardstick, model, name) for name in paper_tables() for model in models],
        "tune": [tune(model, first, kept) for model in models],
    }


def front(name: str, options: list[str]) -> Part:
    """Speed of the recommended settings at the points of the front page, in one run."""
    points = DECODES if name == "decode" else PREFILLS
    shape = [f"--{key}={value}" for point in points.values() for key, value in point.items() if key != "room"]
    methods = [text for setting in FRONT for text in ("--method", setting)]
    return f"front-{name}", bench(name, *methods, *shape, *options)


def released(yardstick: Path, name: str) -> Part:
    """KL, top-1 and pass keys of one released checkpoint."""
    data = yardstick / "data"
    texts = ["--text", str(data / "wikitext2" / "wiki.test.raw"), "--book", str(data / "books" / "heldout.txt")]
    return f"released-{name}", ["python", "eval/released.py", name, *texts, "--processes", "4"]


def quality(yardstick: Path, model: Path, family: str) -> Part:
    """The full run of the yardstick over one model, for one family of settings."""
    script, data = yardstick / "check" / "yardstick.py", yardstick / "data"
    command = ["python", str(script), str(model), str(data), "--methods", families()[family]]
    return f"quality-full-{model.name}:{family}", command


def tasks(yardstick: Path, model: Path, family: str) -> Part:
    """Tasks that the small models were trained for, and perplexity, through lm-eval and the packed cache."""
    settings = ("full" if text == "fp" else text for text in split_methods([families()[family]]))
    chosen = [text for name in TASKS for text in ("--task", name)]
    chosen += [text for name in settings for text in ("--method", name)]
    data = ["--data-dir", str(yardstick / "data"), "--dtype", "float32", "--batch", "50"]
    command = ["python", "-m", "qattn_hf", "eval", str(model), "--json", *data, *chosen]
    return f"tasks-{model.name}:{family}", command


def paper_tables() -> list[str]:
    """Return the tables of `eval/paper.py` that read a model. The others need no GPU."""
    from paper import tables

    return [name for name, table in tables().items() if table.ABOUT.model]


def paper(yardstick: Path, model: Path, name: str) -> Part:
    """A paper's table with one model; recorded if the paper's claims hold on it."""
    text = ["--text", str(yardstick / "data" / "books" / "heldout.txt")]
    return f"table-{name}:{model.name}", ["python", "eval/paper.py", name, "--model", str(model), *text]


def halves(yardstick: Path, kept: Path) -> tuple[Path, Path]:
    """A book collection cut in the middle: to tune on, and to compare on."""
    text = (yardstick / "data" / "books" / "heldout.txt").read_text(encoding="utf-8")
    found = kept / "first-half.txt", kept / "second-half.txt"
    for path, half in zip(found, (text[: len(text) // 2], text[len(text) // 2 :]), strict=True):
        path.write_text(half, encoding="utf-8")
    return found


def tune(model: Path, text: Path, kept: Path) -> Part:
    """Compare the recipe with the least loss in `TUNED_BITS` with others, on rows that it has not seen."""
    recipe = kept / f"tuned-{model.name}.yaml"
    budget = ["--bits", TUNED_BITS, "--check-rows", "12", "--output", str(recipe)]
    command = ["python", "-m", "qattn_hf", "tune", str(model), "--json", "--dtype", "float32"]
    return f"tune:{model.name}", [*command, "--text", str(text), *budget]
