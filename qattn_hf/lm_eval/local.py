"""Data from local files in their original formats, for lm-eval's own tasks and ours.

lm-eval finds tasks in folders. For each task whose data set is in `FILES` and lies in the data folder, a task file is
written that includes the task's own one and changes nothing but where the data comes from: prompts, shots, filters and
metrics stay those of the task. Tasks without local files load from the hub, as ever.
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
    """Where a data set of the hub lies locally.

    Attributes:
        splits: file of each split; `{name}` is the task's `dataset_name`.
        kind: `json`, `csv` or `text`, as `datasets` calls them.
        options: of that loader.
        rows: function of this module that gives the rows the columns of the hub's.
        name: the only `dataset_name` that these files hold.
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
# folders of lm-eval whose tasks read those
STOCK = ("gsm8k", "bbh", "longbench", "humaneval", "wikitext", "mmlu", "lambada", "hendrycks_math")


def with_question(rows: Any) -> Any:
    """LongBench's `input` is `question` on the hub."""
    return rows.rename_column("input", "question")


def with_choices(rows: Any) -> Any:
    """MMLU's columns A to D are `choices` on the hub, and its answer is an index."""
    from datasets import Features, Value

    def choices(row: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [str(row[letter]) for letter in "ABCD"], "answer": "ABCD".index(row["answer"])}

    features = Features({"question": Value("string"), "answer": Value("int64"), "choices": [Value("string")]})
    return rows.map(choices, remove_columns=list("ABCD"), features=features)


def pages(rows: Any) -> Any:
    """WikiText's raw text, one row in all, to one row a page: a page begins at a heading of the first level."""
    from datasets import Dataset

    text = "".join(row["text"] for row in rows)
    starts = [found.start() for found in re.finditer(r"^ = [^=\n]+ = \n", text, re.MULTILINE)]
    return Dataset.from_dict({"page": [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]})


@contextmanager
def task_folders(data_dir: Path | None) -> Iterator[list[str]]:
    """Folders for lm-eval's `include_path`: our task files and, with `data_dir`, those that read from there.

    Raises:
        QAttnError: `data_dir` holds none of the files.
    """
    if data_dir is None:
        yield [str(tasks_dir())]
        return
    with TemporaryDirectory(prefix="qattn-tasks-") as folder, _quiet():
        found = _write(data_dir.expanduser().resolve(), Path(folder))
        if not found:
            wanted = ", ".join(path for files in FILES.values() for path in files.splits.values())
            raise QAttnError(f"--data-dir {data_dir}: none of these is there: {wanted}")
        log.info("%d tasks read their data from %s, all others from the hub", found, data_dir)
        yield [str(tasks_dir()), folder]


def _write(data_dir: Path, folder: Path) -> int:
    """Write the task files; how many."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    stock = Path(lm_eval.tasks.__file__).parent
    count = 0
    for source in (*(stock / name for name in STOCK), tasks_dir()):
        for path in sorted(source.rglob("*.yaml")):
            task = load_yaml(path, resolve_func=False)
            there = _there(task, data_dir)
            if isinstance(task.get("task"), str) and there is not None:
                count += 1
                there["dataset_kwargs"]["cache_dir"] = str(folder / "cache")  # leaves nothing behind
                # A tag named here would be one of these tasks only; those of the included file stay as they are.
                there |= {"include": str(path), "task": task["task"], "tag": None}
                text = yaml.safe_dump(there, sort_keys=False)
                rows = FILES[task["dataset_path"]].rows
                text += f"process_docs: !function {__name__}.{rows}\n" if rows else ""
                (folder / f"{task['task']}.yaml").write_text(text, encoding="utf-8")
    return count


def _there(task: dict[str, Any], data_dir: Path) -> dict[str, Any] | None:
    """What to change in a task's configuration; None where its data is not in the folder."""
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
    """lm-eval warns of every task that is found twice; here that is what was asked for."""
    index = logging.getLogger("lm_eval.tasks._index")

    def wanted(record: logging.LogRecord) -> bool:
        return "overrides existing task" not in record.getMessage()

    index.addFilter(wanted)
    try:
        yield
    finally:
        index.removeFilter(wanted)
