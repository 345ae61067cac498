"""The task files: a model that answers from the data scores 1.0 through each, with made rows and with real files."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")

import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from qattn_hf.assets import demo_model_dir, demo_tasks, tasks_dir
from qattn_hf.cli._prompts import PROSE
from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval import generated
from qattn_hf.lm_eval.local import FILES, STOCK, task_folders
from qattn_hf.lm_eval.model import QAttnLM

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
STOCK_TASKS = Path(lm_eval.tasks.__file__).parent
BBH = {  # a row of each
    "boolean_expressions": ("True and False is", "False"),
    "date_understanding": ("What day is it?\nOptions:\n(A) 1\n(B) 2", "(B)"),
    "word_sorting": ("Sort the following words alphabetically: List: pear apple", "apple pear"),
}
HEADING = " \n = {} = \n \n Some text of the page . \n \n = = Part = = \n More of it . \n"


class Oracle(LM):
    """Says what `say` makes of a request's row and target."""

    def __init__(self, tasks: dict[str, Any], say: Callable[[str, dict, str], str]):
        super().__init__()
        self.tasks, self.say = tasks, say

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            target = self.tasks[request.task_name].doc_to_target(request.doc)
            target = target[0] if isinstance(target, list) else target
            answers.append(self.say(request.task_name, request.doc, target))
        return answers

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The choice that the row names, or the last word of its text, is certain."""
        right = [request.doc.get("answer", request.idx) == request.idx for request in requests]
        certain = [self.say(request.task_name, request.doc, "") == "" for request in requests]
        return [(0.0 if good == sure else -9.0, good == sure) for good, sure in zip(right, certain, strict=True)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def answer(task: str, row: dict[str, Any], target: str) -> str:
    """In the words that the prompt of a chain of thought teaches."""
    if task.startswith(("gsm8k_cot", "bbh_cot")):
        return f"So the answer is {target}." if "fewshot" in task else f"The answer is {target.split('#### ')[-1]}."
    return target


@pytest.fixture(scope="module", params=["made", pytest.param("real", marks=pytest.mark.slow)])
def data(request, tmp_path_factory) -> Path:
    """A data folder: rows made here, or the original files."""
    if request.param == "made":
        return made(tmp_path_factory.mktemp("data"))
    return real()


def real() -> Path:
    if not REAL.is_dir():
        pytest.skip(f"no data sets at {REAL.parent.name}/{REAL.name} next to the repository")
    return REAL


def made(folder: Path) -> Path:
    """Two rows of each data set, and ten where shots are drawn, in the original formats."""
    rng = random.Random(1)
    sums = [dict(zip(("question", "answer"), demo_tasks.sums(rng), strict=True)) for _ in range(12)]
    options = ["A)1", "B)2", "C)3", "D)4", "E)5"]
    aqua = [{"question": "2 - 1?", "options": options, "rationale": "So.", "correct": letter} for letter in "ABCDE" * 2]
    news = {"input": "Who?", "context": "Somebody wrote. " * 30, "answers": ["Somebody wrote it"], "length": 60}
    lines = {
        "gsm8k/train.jsonl": sums[:10],
        "gsm8k/test.jsonl": sums[10:],
        "synthetic/sums_train.jsonl": sums[:10],
        "synthetic/sums_test.jsonl": sums[10:],
        "synthetic/recall_10.jsonl": [dict(zip(("input", "target"), demo_tasks.recall(rng), strict=True))] * 2,
        "aqua/dev.json": aqua,
        "aqua/test.json": aqua[:2],
        "longbench/multi_news.jsonl": [news | {"all_classes": None, "dataset": "multi_news"}] * 2,
        "longbench/multifieldqa_zh.jsonl": [news | {"all_classes": None, "dataset": "multifieldqa_zh"}] * 2,
    }
    lines["lambada/lambada_test.jsonl"] = [{"text": PROSE.rpartition(" ")[0]}] * 2
    lines["math500/test.jsonl"] = [{"problem": "1 + 1", "solution": "It is $\\boxed{2}$.", "answer": "2"}] * 2
    texts = {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in lines.items()}
    for name, row in BBH.items():
        examples = [dict(zip(("input", "target"), row, strict=True))] * 4
        texts[f"bbh/{name}.json"] = json.dumps({"canary": "none", "examples": examples})
    for subject, split in itertools.product(("anatomy", "virology"), ("dev", "test")):
        questions = [f'"What, of {i}?",None,{i},"a, b",c,B' for i in range(5)]
        texts[f"mmlu/{split}/{subject}_{split}.csv"] = "\n".join(questions) + "\n"
    texts["wikitext2/wiki.test.raw"] = "".join(HEADING.format(title) + PROSE * 2 + " \n" for title in ("One", "Two"))
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    program = {"task_id": "t/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n"}
    (folder / "humaneval").mkdir()
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(program | {"test": "def check(f): assert f() == 1"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def manager(data) -> Iterator[TaskManager]:
    with task_folders(data) as folders:
        yield task_manager(folders)


def task_manager(folders: list[str]) -> TaskManager:
    """Load only lm-eval's tasks that ours extend. Finding the other 14,000 takes seconds."""
    wanted = [*(STOCK_TASKS / name for name in STOCK), *folders]
    return TaskManager(include_path=wanted, include_defaults=False, metadata={"pretrained": str(demo_model_dir())})


def results(model: LM, manager: TaskManager, names: list[str], limit: int | None = 3) -> dict[str, Any]:
    return evaluate(model, manager.load(names), limit=limit, bootstrap_iters=0, log_samples=False)["results"]


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(
    ("names", "metric"),
    [
        (["qattn_gsm8k"], "exact_match,flexible-extract"),
        (["gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "aqua_cot", "sums"], "exact_match,strict-match"),
        ([f"bbh_fewshot_{name}" for name in BBH], "exact_match,none"),
        ([f"bbh_cot_fewshot_{name}" for name in BBH], "exact_match,get-answer"),
        ([f"bbh_cot_zeroshot_{name}" for name in BBH], "exact_match,strict-match"),
        (["recall_10"], "exact_match,first-number"),
        (["mmlu_anatomy", "mmlu_virology", "lambada_openai"], "acc,none"),
        (["hendrycks_math500"], "exact_match,none"),
        (["longbench_multi_news", "longbench_multifieldqa_zh"], "score,none"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_oracle_scores_one_with_local_files(manager, names, metric):
    if missing := [name for name in names if manager.task_index[name].yaml_path.is_relative_to(STOCK_TASKS)]:
        pytest.skip(f"no local data of {missing[0]}")
    tasks = manager.load(names)["tasks"]
    found = results(Oracle(tasks, answer), manager, names)
    assert {name: found[name][metric] for name in tasks} == dict.fromkeys(tasks, pytest.approx(1))
    wrong = results(Oracle(tasks, lambda *_: "7 of 9?"), manager, names)
    assert max(wrong[name][metric] for name in tasks) < 0.5


@pytest.mark.slow
def test_an_oracle_scores_one_in_all_of_bbh():
    """With the real files: 27 tasks, three prompts each."""
    with task_folders(real()) as folders:
        found = task_manager(folders)
        tasks = found.load("qattn_bbh")["tasks"]
        scored = results(Oracle(tasks, answer), found, ["qattn_bbh"], limit=1)
    scores = {name: max(v for k, v in scored[name].items() if k.startswith("exact_match,")) for name in tasks}
    assert len(scores) == 81 and scores == dict.fromkeys(tasks, 1)


def test_pages_of_wikitext_begin_at_headings_of_the_first_level(manager, data):
    rows = manager.load("wikitext")["tasks"]["wikitext"].eval_docs
    assert len(rows) == (62 if data == REAL else 2)
    assert all(row["page"].startswith(" = ") and not row["page"].startswith(" = =") for row in rows)


@pytest.mark.slow
def test_perplexity_of_wikitext_is_that_of_what_the_cache_kept(tmp_path):
    with task_folders(made(tmp_path)) as folders:
        found = task_manager(folders)
        models = {
            name: QAttnLM(str(demo_model_dir()), method=name, device="cpu", dtype="float32", **settings)
            for name, settings in (("full", {}), ("turbo", {"bits": 2, "sink_num": 0}))
        }
        scored = {
            name: results(lm, found, ["wikitext"])["wikitext"]["word_perplexity,none"] for name, lm in models.items()
        }
    assert scored["turbo"] > 1.1 * scored["full"] > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("path", [demo_model_dir(), REAL.parent / "models" / "tiny-llama-28m"], ids=lambda x: x.name)
def test_rows_run_end_to_end_through_lm_evals_own_tasks(manager, data, path):
    """And a packed cache; a score near zero is fine."""
    if not path.is_dir():
        pytest.skip(f"no model {path.name} next to the repository")
    if data != REAL and path != demo_model_dir():
        pytest.skip("made rows are read by one model, the real ones by both")
    sizes = {"batch_size": 2, "max_length": 1500}
    lm = QAttnLM(str(path), method="turbo", k_bits=4, v_bits=2, device="cpu", dtype="float32", **sizes)
    names = ["gsm8k_cot", "bbh_cot_fewshot_date_understanding", "longbench_multi_news"]
    tasks = manager.load(names)
    for task in tasks["tasks"].values():
        task.set_config(key="generation_kwargs", value={"max_gen_toks": 8}, update=True)
    found = evaluate(lm, tasks, limit=1, bootstrap_iters=0, log_samples=False)["results"]
    assert set(found) == set(names)
    assert all(lm.usages[name].packed_requests == lm.usages[name].requests == 1 for name in names)


@pytest.fixture(scope="module")
def without_data() -> Iterator[TaskManager]:
    with task_folders(None) as folders:
        yield task_manager(folders)


def test_an_oracle_scores_one_on_what_comes_from_a_seed(without_data):
    names = ["sums", "recall_10", "recall_40", "recall_100", "drift"]
    tasks = without_data.load(names)["tasks"]
    found = results(Oracle(tasks, answer), without_data, names)
    assert found["sums"]["exact_match,strict-match"] == found["drift"]["acc,none"] == 1
    assert all(found[name]["exact_match,first-number"] == 1 for name in names if name.startswith("recall"))
    assert all(found["drift"][f"quarter_{i},none"] == 1 for i in (1, 2, 3, 4))


@pytest.mark.slow
def test_needles_lie_at_their_depths_in_texts_of_their_lengths(without_data):
    names = ["needle_single", "needle_multikey"]
    tasks = without_data.load(names)["tasks"]
    found = results(Oracle(tasks, answer), without_data, names, limit=None)
    for name in names:
        values = [value for key, value in found[name].items() if key.endswith(",none") and "stderr" not in key]
        assert values == [1] * 9, found[name]  # in all, five depths, three lengths
        for row in tasks[name].eval_docs:
            sentence = f"The special magic number of {row['name']} is {row['target']}. "
            where = row["input"].index(sentence) / (row["input"].index("\nWhat is") - len(sentence))
            assert where == pytest.approx(row["depth"] / 100, abs=0.1)
    tokenizer = generated.tokenizer_of({"pretrained": str(demo_model_dir())}, "needle")
    lengths = [len(tokenizer(row["input"]).input_ids) / row["length"] for row in tasks["needle_multikey"].eval_docs]
    assert min(lengths) > 0.9 and max(lengths) <= 1
    with pytest.raises(QAttnError, match="lengths are of"):
        generated.needle(0, lengths=[1000])
    with pytest.raises(QAttnError, match="name a tokenizer"):
        generated.needle(0, lengths=[1024])


def test_an_oracle_calls_every_tool_right():
    names, lengths = ["qattn_tools"], {"lengths": [4096], "samples": 3}
    found = TaskManager(
        include_path=str(tasks_dir()), include_defaults=False, metadata={"pretrained": str(demo_model_dir()), **lengths}
    )
    scored = results(Oracle(found.load(names)["tasks"], answer), found, names)["qattn_tools"]
    assert scored["acc,none"] == scored["arguments,none"] == scored["tokens_4096,none"] == 1


def test_drift_tells_early_errors_from_late_ones():
    row = generated.drift(lines=8, cycle=3)["test"][0]
    said = row["target"].splitlines()
    said[6] = said[6].split()[0] + " nobody"
    found = generated.drift_results(row, ["\n".join(said)])
    assert found == {"acc": 7 / 8, "quarter_1": 1, "quarter_2": 1, "quarter_3": 1, "quarter_4": 0.5}
    assert generated.drift_results(row, ["\n".join(said[:4])])["quarter_3"] == 0


def test_sums_are_gsm8ks_task_over_other_rows():
    ours, stock = plain(tasks_dir() / "sums.yaml"), plain(STOCK_TASKS / "gsm8k" / "gsm8k.yaml")
    same = ("doc_to_text", "doc_to_target", "generation_kwargs", "filter_list", "metric_list", "output_type")
    assert {key: ours[key] for key in same} == {key: stock[key] for key in same}


def plain(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8").replace("!function ", ""))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_task_files_name_tasks_that_lm_eval_has_and_hide_none(caplog, every: bool):
    """Groups are small lists of stock names; a name that lm-eval drops would fail only when it is run.

    Not `every`: among lm-eval's tasks of the folders that ours extend.
    """
    found = (TaskManager(include_path=str(tasks_dir())) if every else task_manager([str(tasks_dir())])).all_tasks
    ours = [plain(path) for path in sorted(tasks_dir().glob("*.yaml"))]
    hidden = set(re.findall(r"Task '(.+?)' .*overrides existing task", caplog.text))
    assert hidden & {task.get("group") or task["task"] for task in ours} == set()
    parts = [part for task in ours if "group" in task for part in task["task"]]
    wanted = [part if isinstance(part, str) else part["task"] for part in parts]
    assert wanted and [name for name in wanted if name not in found] == []
    assert [task for task in ours if (task.get("group") or task["task"]) not in found] == []


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(QAttnError, match=r"none of these is there: gsm8k/train.jsonl"), task_folders(tmp_path):
        pass


def test_local_files_change_nothing_but_the_data(tmp_path):
    with task_folders(made(tmp_path)) as folders:
        local = {path.stem: plain(path) for path in Path(folders[1]).glob("*.yaml")}
    keys = {
        "include",
        "task",
        "tag",
        "dataset_path",
        "dataset_name",
        "custom_dataset",
        "dataset_kwargs",
        "process_docs",
    }
    assert set().union(*local.values()) <= keys | {"training_split", "validation_split"} and "gsm8k_cot" in local
    assert {task["tag"] for task in local.values()} == {None}
    assert "longbench_hotpotqa" not in local  # its file is not there: it loads from the hub
    assert {files.rows for files in FILES.values()} == {None, "with_question", "with_choices", "pages"}
