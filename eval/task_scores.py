"""Task scores of settings on released models, with their agreement with full precision.

    python eval/task_scores.py FOLDER=gsm8k,bbh,longbench,tools TUNED=gsm8k --data-dir DATA --processes 16
    python eval/record.py task-scores-smollm2 -- python eval/task_scores.py ...

The measurement is that of `qattn eval`, spread over processes on all GPUs, because steps of a small model wait for the
host. A process takes one model, task and setting at a time and prints one JSON row: score with its standard error,
share of full precision's answers, bits, seconds in the model, number of questions. For rows with lengths, such as tool
calls, it adds agreement by length and the longest length at which a setting holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qattn_hf.lm_eval.agreement import Answer, Place, agreement
from qattn_hf.model.loading import load, short_name
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.spelling import FULL

SETTINGS = (
    FULL,
    "none",
    "int8",
    "turbo",
    "low3",
    "low2",
    "kivi:bits=4,group_size=128",
    "kivi:bits=2,group_size=128,residual_length=32",
    "sinkq",
)


class Task(NamedTuple):
    """A task, and how it is run.

    Attributes:
        name: lm-eval's. metric, kind: of its score; `kind` is lm-eval's filter.
        batch: rows at once. tokens: of an answer at most.
        limit: questions of each of its subtasks; None: all.
        others: metrics that are kept with the score.
        chat: whether questions go into the chat template. Tasks with shots are texts to be continued.
        metadata: for tasks that are generated.
    """

    name: str
    metric: str
    kind: str
    batch: int
    tokens: int
    limit: int | None = None
    others: tuple[str, ...] = ()
    chat: bool = False
    metadata: dict[str, Any] = {}  # noqa: RUF012 (read only)


LENGTHS = (1024, 2048, 4096, 8192)  # SmolLM2 has 8,192 positions
TASKS = {
    "gsm8k": Task("gsm8k", "exact_match", "strict-match", 192, 256),
    "bbh": Task("bbh_cot_fewshot", "exact_match", "get-answer", 135, 256, 15),
    "longbench": Task("longbench_multi_news", "score", "none", 25, 128, chat=True),
    "tools": Task(
        "qattn_tools", "acc", "none", 25, 96, others=("arguments",), metadata={"lengths": list(LENGTHS), "samples": 50}
    ),
}


class Unit(NamedTuple):
    """What a process measures at a time: a task of `TASKS` with one setting on the model in `folder`.

    Attributes:
        limit: questions in place of the task's own limit. data_dir: folder of local data; None: the hub.
    """

    folder: str
    task: str
    setting: str
    limit: int | None
    data_dir: Path | None


class Measured(NamedTuple):
    """Rows of a unit as `qattn eval` has them, its answers, and its seconds, model and data loaded."""

    rows: list[dict[str, Any]]
    answers: dict[Place, Answer]
    seconds: float


_device = ["cpu"]  # of this process


def start(devices: Any) -> None:
    """Make a process ready: take one of the devices in the queue, and import what takes seconds."""
    _device[0] = devices.get()
    torch.set_num_threads(1)
    if _device[0] != "cpu":
        torch.cuda.set_device(_device[0])
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew at each length, which full precision would wait for
    import qattn_hf.lm_eval.run

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger(qattn_hf.lm_eval.run.__name__).setLevel(logging.ERROR)


def measure(unit: Unit) -> Measured:
    """Evaluate a unit in this process.

    Raises:
        QAttnError: no such task, or no data for it. RecipeError: no such setting.
    """
    from qattn_hf.lm_eval.local import task_folders
    from qattn_hf.lm_eval.run import evaluated, task_manager

    began, task = time.perf_counter(), TASKS[unit.task]
    recipe = None if unit.setting == FULL else find_recipe(unit.setting, None, {})
    _, model, tokenizer = load(unit.folder, _device[0], "float32" if _device[0] == "cpu" else "auto")
    recipe = recipe and recipe.for_model(model.config)
    options: dict[str, Any] = {"limit": unit.limit or task.limit, "apply_chat_template": task.chat}
    options |= {"gen_kwargs": {"max_gen_toks": task.tokens}}
    with task_folders(unit.data_dir) as folders:
        manager = task_manager(folders, [task.name], {"pretrained": unit.folder, **task.metadata})
        found = evaluated(
            model, tokenizer, unit.setting, recipe, [task.name], manager, {"batch_size": task.batch}, options
        )
    assert found is not None  # of one process
    del model
    gc.collect()
    if _device[0] != "cpu":
        torch.cuda.empty_cache()  # for the other processes on this GPU
    return Measured(found.rows, found.answers, time.perf_counter() - began)


def row_of(unit: Unit, measured: Measured, full: Measured | None) -> dict[str, Any]:
    """The row that is printed of a unit; with agreement where full precision's answers are given."""
    task = TASKS[unit.task]
    named = {(row["metric"], row["filter"]): row for row in measured.rows if row["task"] == task.name}
    score = named[task.metric, task.kind]
    own = _of_task(task, measured)
    row: dict[str, Any] = {
        "model": short_name(unit.folder),
        "task": unit.task,
        "setting": unit.setting,
        "metric": task.metric,
    }
    row |= {"score": round(score["value"], 5), "stderr": _rounded(score["stderr"], 5), "questions": len(own)}
    row["unanswered"] = round(sum(answer.missing for answer in own.values()) / max(1, len(own)), 4)
    if full is not None:
        found = agreement(own, _of_task(task, full), task.name, task.kind)
        row |= {key: _rounded(value, 4) for key, value in found.items()}
    usages = [one for one in _first_of_tasks(measured.rows) if "requests" in one]
    bits = [one["effective_bits"] for one in usages if one["effective_bits"] is not None]
    row |= {"bits": round(sum(bits) / len(bits), 3) if bits else None}
    row |= {"packed": sum(one["packed_requests"] for one in usages)}
    row |= {key: sum(one[key] for one in usages) for key in ("tokens", "generated")}
    row["model_seconds"] = round(sum(one["seconds"] for one in usages), 1)
    row["seconds"] = round(measured.seconds, 1)
    kept = {metric: named[metric, task.kind]["value"] for metric in task.others}
    by_length = {f"{key[0]}": one["value"] for key, one in named.items() if key[0].startswith("tokens_")}
    return row | {key: round(value, 4) for key, value in (kept | by_length).items()}


def _of_task(task: Task, measured: Measured) -> dict[Place, Answer]:
    """Answers after the task's filter. A group's subtasks count as one task."""
    places = [place for place in measured.answers if place[1] == task.kind]
    subtasks = {name: number for number, name in enumerate(sorted({place[0] for place in places}))}
    return {
        (task.name, task.kind, place[2] * len(subtasks) + subtasks[place[0]]): measured.answers[place]
        for place in places
    }


def _first_of_tasks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each task: all of a task have the same usage."""
    return list({row["task"]: row for row in reversed(rows)}.values())


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: round(one, digits) for key, one in value.items()}
    return round(value, digits) if isinstance(value, float) else value


def print_rows(units: list[Unit], processes: int) -> int:
    """Measure the units and print the row of each once full precision's answers are there; return how many failed."""
    context = get_context("spawn")
    devices, gpus = context.Queue(), torch.cuda.device_count()
    for number in range(processes):
        devices.put(f"cuda:{number % gpus}" if gpus else "cpu")
    failed, waiting = 0, {unit for unit in units if unit.setting == FULL}
    full: dict[tuple[str, str], Measured] = {}
    held: list[tuple[Unit, Measured]] = []
    with ProcessPoolExecutor(processes, mp_context=context, initializer=start, initargs=(devices,)) as pool:
        futures = {pool.submit(measure, unit): unit for unit in units}
        for future in as_completed(futures):
            unit = futures[future]
            waiting.discard(unit)
            try:
                measured = future.result()
            except Exception as error:  # a row says that the unit failed, the others go on
                failed += 1
                said = f"{type(error).__name__}: {str(error)[:300]}"
                _print({"model": short_name(unit.folder), "task": unit.task, "setting": unit.setting, "error": said})
            else:
                if unit.setting == FULL:
                    full[unit.folder, unit.task] = measured
                held.append((unit, measured))
            coming = {(one.folder, one.task) for one in waiting}
            ready = [one for one in held if one[0][:2] not in coming]
            held = [one for one in held if one[0][:2] in coming]
            for done, found in ready:
                _print(row_of(done, found, None if done.setting == FULL else full.get(done[:2])))
    return failed


def stop(*_: Any) -> None:
    """End all processes on SIGTERM. They would keep the output open, and the printed rows could not be recorded."""
    for child in active_children():
        child.kill()
    os._exit(128 + signal.SIGTERM)


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def units_of(options: argparse.Namespace) -> list[Unit]:
    """All units. Full precision comes first, since the others wait for its answers, then the longest tasks."""
    settings = [one for one in options.settings.split(";") if one]
    units = []
    for asked in options.work:
        folder, _, tasks = asked.partition("=")
        for task in tasks.split(",") if tasks else TASKS:
            if task not in TASKS:
                sys.exit(f"{asked}: no task {task!r}; there are {', '.join(TASKS)}")
            units += [Unit(folder, task, setting, options.limit, options.data_dir) for setting in settings]
    longest = ("bbh", "gsm8k", "longbench", "tools")
    return sorted(units, key=lambda unit: (unit.setting != FULL, longest.index(unit.task)))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scores of tasks and agreement with full precision, by setting.")
    parser.add_argument("work", nargs="+", metavar="FOLDER[=TASK,TASK]", help=f"model and tasks: {', '.join(TASKS)}")
    parser.add_argument("--settings", default=";".join(SETTINGS), help="with ; between; `full` is full precision")
    parser.add_argument("--data-dir", type=Path, help="local data in place of the hub's")
    parser.add_argument("--limit", type=int, help="questions of each task, for a trial")
    parser.add_argument("--processes", type=int, default=1, help="processes, on all GPUs in turn")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    units = units_of(options)
    signal.signal(signal.SIGTERM, stop)
    sys.exit(1 if print_rows(units, max(1, min(options.processes, len(units)))) else 0)


if __name__ == "__main__":
    main()
