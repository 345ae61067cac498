"""Evaluate several methods on several tasks with one model, for `qattn eval`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval.agreement import Answer, Place, agreement, answers
from qattn_hf.lm_eval.arguments import FULL
from qattn_hf.lm_eval.local import task_folders
from qattn_hf.lm_eval.model import QAttnLM
from qattn_hf.recipes.recipe import Recipe


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
    """Evaluate, and yield one row for each method, task and metric.

    Full precision is evaluated first if it is among the methods. Rows of other methods then have `agreement.agreement`
    with its answers.

    Args:
        model, tokenizer: model to evaluate, and its tokenizer.
        methods: recipes by name. None is full precision.
        tasks: names of tasks, of lm-eval or this package.
        data_dir: folder of local data. None: the hub.
        metadata: metadata of lm-eval's tasks. `pretrained` names the tokenizer that counts tokens.
        arguments: arguments of `QAttnLM`.
        options: options of lm-eval's `simple_evaluate`.

    Raises:
        QAttnError: a task is unknown, or `data_dir` has no data.
    """
    with task_folders(data_dir) as folders:
        manager = task_manager(folders, tasks, metadata)
        of_full: dict[Place, Answer] = {}
        for name, recipe in sorted(methods.items(), key=lambda method: method[1] is not None):
            found = evaluated(model, tokenizer, name, recipe, tasks, manager, arguments, options)
            if found is None:  # only the first of several processes has results
                continue
            for row in found.rows:
                yield {**row, **agreement(found.answers, of_full, row["task"], row["filter"])}
            of_full = found.answers if recipe is None else of_full


class Evaluated(NamedTuple):
    """Rows of one method, one for each task and metric, and its answers."""

    rows: list[dict[str, Any]]
    answers: dict[Place, Answer]


def evaluated(
    model: Any,
    tokenizer: Any,
    name: str,
    recipe: Recipe | None,
    tasks: list[str],
    manager: TaskManager,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> Evaluated | None:
    """Evaluate one method, as `rows` does for several. Returns None except in the first of several processes."""
    how = {"method": FULL} if recipe is None else {"recipe": recipe}
    lm = QAttnLM(model, tokenizer=tokenizer, **how, **arguments)
    results = simple_evaluate(lm, tasks=tasks, task_manager=manager, log_samples=True, **options)
    return None if results is None else Evaluated(list(_rows(name, lm, results)), answers(results["samples"]))


def task_manager(folders: list[str], tasks: list[str], metadata: dict[str, Any]) -> TaskManager:
    """Make a task manager. It has only this package's tasks if they suffice, because indexing lm-eval's takes seconds.

    Raises:
        QAttnError: a task is unknown.
    """
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if not set(tasks) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=folders, metadata=metadata)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise QAttnError(f"--task {unknown[0]}: no such task; `python -m qattn_hf.lm_eval ls tasks` lists them")
    return manager


def _rows(name: str, lm: QAttnLM, results: Any) -> Iterator[dict[str, Any]]:
    recipe = lm.recipe
    head = {"method": name, "recipe": None if recipe is None else recipe.settings.model_dump(), "mode": lm.mode}
    for task, metrics in results["results"].items():
        n = results["n-samples"].get(task, {}).get("effective")
        usage = lm.usages[task].to_dict() if task in lm.usages else {}
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and value != "N/A":
                stderr = metrics.get(f"{metric}_stderr,{kind}")
                measured = {"metric": metric, "filter": kind, "value": value, "n": n}
                measured["stderr"] = stderr if isinstance(stderr, float) else None
                yield {**head, "task": task, **measured, **usage}
