"""Read data from local files in their original formats, for lm-eval's tasks and this package's.

lm-eval finds tasks in folders. If the data folder has the data set of a task (`FILES`), a task file is written. It
includes the original task and changes only the source of the data. Prompts, shots, filters and metrics stay unchanged.
Tasks without local files load from the hub.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from qattn_hf.assets import tasks_dir
from qattn_hf.errors import QAttnError

log = logging.getLogger(__name__)


class Files(NamedTuple):
    """Local files of a data set on the hub.

    Attributes:
        splits: file of each split. `{name}` is the task's `dataset_name`.
        kind: `json`, `csv` or `text`, as `datasets` calls them.
        options: options of that loader.
        rows: name of the function in this module that converts rows to the columns of the hub's data set.
        name: the only `dataset_name` that these files have.
    """

    splits: dict[str, str]
    kind: str = "json"
    options: dict[str, Any] = {}  # noqa: RUF012 (read only)
    rows: str | None = None
    name: str | None = None


FILES = {
    "openai/gsm8k": Files({"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"}),
    "SaylorTwift/bbh": Files({"test": "bbh/{name}.json"}, options={"field": "examples"}),
    "deepmind/aqua_rat": Files({"validation": "aqua/dev.json", "test": "aqua/test.json"}),
    "Xnhyacinth/LongBench": Files({"test": "longbench/{name}.jsonl"}, rows="with_question"),
    "openai/openai_humaneval": Files({"test": "humaneval/HumanEval.jsonl.gz"}),
    "EleutherAI/wikitext_document_level": Files(
        {"test": "wikitext2/wiki.test.raw"},
        kind="text",
        options={"sample_by": "document"},
        rows="pages",
        name="wikitext-2-raw-v1",
    ),
    "cais/mmlu": Files(
        {split: f"mmlu/{split}/{{name}}_{split}.csv" for split in ("dev", "test")},
        kind="csv",
        options={"column_names": ["question", *"ABCD", "answer"], "keep_default_na": False},
        rows="with_choices",
    ),
    "EleutherAI/lambada_openai": Files({"test": "lambada/lambada_test.jsonl"}, name="default"),
    "HuggingFaceH4/MATH-500": Files({"test": "math500/test.jsonl"}),
    "qattn/sums": Files({"train": "synthetic/sums_train.jsonl", "test": "synthetic/sums_test.jsonl"}),
    "qattn/recall": Files({"test": "synthetic/recall_{name}.jsonl"}),
}
# folders of lm-eval whose tasks read these data sets
STOCK = ("gsm8k", "bbh", "longbench", "humaneval", "wikitext", "mmlu", "lambada", "hendrycks_math")


def with_question(rows: Any) -> Any:
    """Rename LongBench's column `input` to `question`, as on the hub."""
    return rows.rename_column("input", "question")


def with_choices(rows: Any) -> Any:
    """Convert MMLU's columns A to D to `choices`, and its answer to an index, as on the hub."""
    from datasets import Features, Value

    def choices(row: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [str(row[letter]) for letter in "ABCD"], "answer": "ABCD".index(row["answer"])}

    features = Features({"question": Value("string"), "answer": Value("int64"), "choices": [Value("string")]})
    return rows.map(choices, remove_columns=list("ABCD"), features=features)


def pages(rows: Any) -> Any:
    """Split WikiText's raw text into one row for each page. A page begins at a heading of the first level."""
    from datasets import Dataset

    text = "".join(row["text"] for row in rows)
    starts = [found.start() for found in re.finditer(r"^ = [^=\n]+ = \n", text, re.MULTILINE)]
    return Dataset.from_dict({"page": [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]})


@contextmanager
def task_folders(data_dir: Path | None) -> Iterator[list[str]]:
    """Provide folders for lm-eval's `include_path`: this package's tasks, and tasks whose data is in `data_dir`.

    Raises:
        QAttnError: `data_dir` has none of the files.
    """
    if data_dir is None:
        yield [str(tasks_dir())]
        return
    with TemporaryDirectory(prefix="qattn-tasks-") as folder, _quiet():
        count = _write(data_dir.expanduser().resolve(), Path(folder))
        if not count:
            wanted = ", ".join(path for files in FILES.values() for path in files.splits.values())
            raise QAttnError(f"--data-dir {data_dir}: none of these is there: {wanted}")
        log.info("%d tasks read their data from %s, all others from the hub", count, data_dir)
        yield [str(tasks_dir()), folder]


def _write(data_dir: Path, folder: Path) -> int:
    """Write the task files and return their number."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    stock = Path(lm_eval.tasks.__file__).parent
    count = 0
    for source in (*(stock / name for name in STOCK), tasks_dir()):
        for path in sorted(source.rglob("*.yaml")):
            task = load_yaml(path, resolve_func=False)
            changes = _local_data(task, data_dir)
            if isinstance(task.get("task"), str) and changes is not None:
                count += 1
                changes["dataset_kwargs"]["cache_dir"] = str(folder / "cache")  # removed with the folder
                # A tag named here would select only these tasks. The included file keeps its tags.
                changes |= {"include": str(path), "task": task["task"], "tag": None}
                text = yaml.safe_dump(changes, sort_keys=False)
                rows = FILES[task["dataset_path"]].rows
                text += f"process_docs: !function {__name__}.{rows}\n" if rows else ""
                (folder / f"{task['task']}.yaml").write_text(text, encoding="utf-8")
    return count


def _local_data(task: dict[str, Any], data_dir: Path) -> dict[str, Any] | None:
    """Return changes of a task's configuration that read its data from the folder, or None if a file is missing."""
    files, name = FILES.get(task.get("dataset_path", "")), task.get("dataset_name")
    if files is None or files.name not in (None, name):
        return None
    paths = {split: data_dir / path.format(name=name) for split, path in files.splits.items()}
    if not all(path.is_file() for path in paths.values()):
        return None
    options = {"data_files": {split: str(path) for split, path in paths.items()}, **files.options}
    splits = {f"{key}_split": None for key in ("training", "validation") if task.get(f"{key}_split") not in paths}
    return {
        "dataset_path": files.kind,
        "dataset_name": None,
        "custom_dataset": None,
        "dataset_kwargs": options,
    } | splits


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop lm-eval's warnings about tasks that are defined twice, which is intended here, within a `with` block."""
    index = logging.getLogger("lm_eval.tasks._index")

    def wanted(record: logging.LogRecord) -> bool:
        return "overrides existing task" not in record.getMessage()

    index.addFilter(wanted)
    try:
        yield
    finally:
        index.removeFilter(wanted)
