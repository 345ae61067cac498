"""Several methods on several tasks with one model: what `qattn eval` measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval.arguments import FULL
from qattn_hf.lm_eval.local import task_folders
from qattn_hf.lm_eval.model import QAttnLM
from qattn_hf.recipe import Recipe


def rows(
    model: Any,
    tokenizer: Any,
    methods: dict[str, Recipe | None],
    tasks: list[str],
    data_dir: Path | None,
    metadata: dict[str, Any],
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """One row a method, task and metric, as they come.

    Args:
        methods: recipes by the name in the rows; None is full precision.
        tasks: of lm-eval or of ours.
        data_dir: folder of local data; None: the hub.
        metadata: for tasks; `pretrained` is where those that count tokens find the tokenizer.
        arguments: of `QAttnLM`. options: of lm-eval's `simple_evaluate`.

    Raises:
        QAttnError: no such task, or no data.
    """
    with task_folders(data_dir) as folders:
        manager = _manager(folders, tasks, metadata)
        if unknown := [name for name in tasks if name not in manager.all_tasks]:
            raise QAttnError(f"--task {unknown[0]}: no such task; `python -m qattn_hf.lm_eval ls tasks` lists them")
        for name, recipe in methods.items():
            how = {"method": FULL} if recipe is None else {"recipe": recipe}
            lm = QAttnLM(model, tokenizer=tokenizer, **how, **arguments)
            found = simple_evaluate(lm, tasks=tasks, task_manager=manager, log_samples=False, **options)
            yield from _rows(name, lm, found)


def _manager(folders: list[str], tasks: list[str], metadata: dict[str, Any]) -> TaskManager:
    """Of our tasks alone where they are enough: to find lm-eval's takes seconds. A group may name any of these."""
    ours = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if set(tasks) <= set(ours.all_subtasks):
        return ours
    return TaskManager(include_path=folders, metadata=metadata)


def _rows(name: str, lm: QAttnLM, found: Any) -> Iterator[dict[str, Any]]:
    recipe = lm.recipe
    head = {"method": name, "recipe": None if recipe is None else recipe.settings.model_dump(), "mode": lm.mode}
    for task, results in found["results"].items():
        n = found["n-samples"].get(task, {}).get("effective")
        usage = lm.usages[task].to_dict() if task in lm.usages else {}
        for key, value in results.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and value != "N/A":
                stderr = results.get(f"{metric}_stderr,{kind}")
                measured = {"metric": metric, "filter": kind, "value": value, "n": n}
                measured["stderr"] = stderr if isinstance(stderr, float) else None
                yield {**head, "task": task, **measured, **usage}
