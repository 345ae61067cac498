"""The scripts that record measurements and make the tables of README and docs of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from recorded import conditions, runs_of, spelled_now

from qattn_hf import list_methods
from qattn_hf.methods import measured_settings
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.recipes.spelling import split_methods

ROOT = Path(__file__).resolve().parent.parent


def script(name: str, folder: str = "eval") -> ModuleType:
    """A script as a module. `eval/` and `docs/` are no packages."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = ("record", "tables", "gpu", "gpu_parts", "recipes")
record, tables, gpu, gpu_parts, recipes = map(script, SCRIPTS)


def run_record(tmp_path: Path, code: str, *arguments: str, name: str = "sample", wanted: int = 0, **options) -> Path:
    given = [f"--{option}" for option in options]
    with pytest.raises(SystemExit) as ended:
        record.main([name, "--results", str(tmp_path / "results"), *given, "--", "python", "-c", code, *arguments])
    assert ended.value.code == wanted, ended.value.code
    return tmp_path / "results" / f"{name}.json"


def test_record_keeps_rows_and_says_how_they_came_about(tmp_path, capfd):
    code = "import json; print('loading'); print(json.dumps({'kl': 0.5})); print('[1]'); print('{\"kl\": 1}')"
    result = json.loads(run_record(tmp_path, code).read_text())
    assert result["rows"] == [{"kl": 0.5}, {"kl": 1}]
    assert result["command"].startswith("python -c ")
    assert result["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result["versions"]["torch"] and result["device"] and len(result["date"]) == 10
    assert "loading" in capfd.readouterr().out, "the command's output is shown while it runs"


def test_record_writes_no_absolute_path(tmp_path, monkeypatch):
    root = tmp_path / "near" / "repository"
    monkeypatch.setattr(record, "ROOT", root)
    code = f'print(\'{{"model": "{tmp_path}/net"}}\')'
    paths = (root / "eval" / "bits.py", root.parent / "data", tmp_path / "far")
    text = run_record(tmp_path, code, *map(str, paths), f"--out={root}/x.json").read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert result["command"].endswith(" eval/bits.py ../data far --out=x.json")
    assert result["rows"] == [{"model": "net"}]


@pytest.mark.parametrize("code", ["print('{\"kl\": 1}'); raise SystemExit(3)", "print('no rows')"])
def test_record_of_a_failure_keeps_the_old_result(tmp_path, code):
    target = run_record(tmp_path, "print('{\"kl\": 1}')")
    before = target.read_text()
    with pytest.raises(AssertionError, match="nothing was written"):
        run_record(tmp_path, code)
    assert target.read_text() == before


def test_record_of_failed_tests_says_that_they_failed(tmp_path):
    code = 'print(\'{"test": "a", "outcome": "failed"}\'); raise SystemExit(3)'
    result = json.loads(run_record(tmp_path, code, wanted=3, failed=True).read_text())
    assert result["exit_code"] == 3 and result["rows"][0]["outcome"] == "failed"


@pytest.mark.slow
def test_record_keeps_what_was_printed_until_it_was_stopped(tmp_path):
    code = "import time; print('{\"kl\": 1}', flush=True); time.sleep(60)"
    given = ["sample", "--failed", "--results", str(tmp_path), "--", "python", "-c", code]
    with subprocess.Popen([sys.executable, record.__file__, *given], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 143
    result = json.loads((tmp_path / "sample.json").read_text())
    assert result["exit_code"] == 143 and result["rows"] == [{"kl": 1}]


def test_a_run_takes_the_place_of_its_name_and_the_others_stay(tmp_path):
    def record_run(run: str, kl: int) -> Path:
        code = f"print('{{\"kl\": {kl}}}')"
        with pytest.raises(SystemExit) as ended:
            record.main([f"net:{run}", "--results", str(tmp_path), "--", "python", "-c", code])
        assert ended.value.code == 0
        return tmp_path / "net.json"

    for run, kl in (("a", 1), ("b", 2), ("a", 3)):
        path = record_run(run, kl)
    found = runs_of(path)
    assert [(run["name"], run["rows"], run["command"][:7]) for run in found] == [
        ("net:a", [{"kl": 3}], "python "),
        ("net:b", [{"kl": 2}], "python "),
    ]
    path.write_text('{"name": "net", "rows": []}')
    with pytest.raises(AssertionError, match="one run without a name"):
        record_run("a", 1)


def test_record_refuses_a_name_that_is_a_path(tmp_path, capsys):
    run_record(tmp_path, "print('{}')", name="../outside", wanted=2)
    assert "../outside" in capsys.readouterr().err


def write_results(folder: Path) -> Path:
    """One quality result and one of bits, as `record.py` writes them."""
    origin = {"command": "python measure.py", "date": "2030-01-02", "device": "CPU", "versions": {"torch": "9.9"}}
    quality = [
        {"model": "net", "method": "fp", "ppl": 34.25, "recall": 0.975},
        {"model": "net", "method": "turbo", "bits": "mixed", "kl": 0.0123, "same_top1": 0.9, "ppl": 34.5,
         "ppl_change_pct": 0.73, "se_pct": 0.1, "packed_tokens": 9, "effective_bits": 3.2666,
         "effective_bits_total": 3.5, "kv_bytes": 7, "impl": "reference", "recall": 0.5, "recall_lost_won": [3, 1]},
    ]  # fmt: skip
    bits = [
        {"method": "int8", "head_dim": 128, "kv_heads": 8, "tokens": n, "packed_tokens": n, "effective_bits": 8.5,
         "effective_bits_total": 8.5 + 64 / n}
        for n in (4096, 512)
    ]  # fmt: skip
    folder.mkdir()
    for name, rows in (("quality-full-net", quality), ("bits", bits)):
        (folder / f"{name}.json").write_text(json.dumps({"name": name, **origin, "rows": rows}))
    return folder


README = (
    "# Title\n\n<!-- table:trained -->\nold\n<!-- /table -->\n\nkept\n\n<!-- table:bits -->\n<!-- /table -->\n\n"
    "<!-- table:conditions-size -->\n<!-- /table -->\nend\n"
)


def test_tables_hold_the_recorded_figures_and_their_conditions(tmp_path):
    text = tables.fill(README, write_results(tmp_path / "results"))
    assert "old" not in text and "\nkept\n" in text and text.endswith("<!-- /table -->\nend\n")
    assert "| setting | net |" in text and "| `turbo:bits=mixed` | 0.0123 |" in text
    assert "all, 512 tokens | all, 4096 tokens" in text
    assert "| `int8` | 8.500 | 8.625 | 8.516 |" in text
    assert "Recorded on CPU, torch 9.9 (2030-01-02). Commands and versions: `eval/results/bits*.json`, " in text
    assert tables.fill(text, tmp_path / "results") == text, "filling a filled file changes nothing"


def test_tables_without_results_say_so(tmp_path):
    assert tables.fill(README, tmp_path).count("Not measured yet.") == 3


def test_a_table_without_an_end_takes_nothing_with_it(tmp_path):
    with pytest.raises(ValueError, match="table:trained has no"):
        tables.fill("<!-- table:trained -->\nprose\n<!-- table:claimed -->\n<!-- /table -->", tmp_path)


def test_scores_stand_beside_full_precision_first(tmp_path):
    (tmp_path / "results").mkdir()
    head = {"date": "2030-01-02", "device": "GPU", "versions": {"torch": "9.9"}}
    held = {"scored": 200, "scored_through_packed": 190, "effective_bits": 3.25, "kv_share": 0.2}
    for family, method in (("a", "turbo:bits=mixed"), ("b", "full")):
        sums = {"task": "sums", "metric": "exact_match", "filter": "strict-match", "value": 0.5, "stderr": 0.01}
        words = {"task": "wikitext", "metric": "word_perplexity", "filter": "none", "value": 99.96, "stderr": None}
        words |= held if family == "a" else {**held, "effective_bits": None}
        rows = [{"model": "../models/net", "method": method, **row} for row in (sums, words)]
        command = f"python measure.py --task sums --method {method}"
        recorded = {"name": f"tasks-net-{family}", "command": command, **head, "rows": rows}
        (tmp_path / "results" / f"tasks-net-{family}.json").write_text(json.dumps(recorded))
    text = tables.TABLES["scores"](tmp_path / "results")
    lines = [line for line in text.splitlines() if line.startswith(("| full", "| `turbo"))]
    assert lines == [
        "| full precision | 0.500 (0.010) | 100.0 |  |  |  |",
        "| `turbo:bits=mixed` | 0.500 (0.010) | 100.0 | 95% | 3.250 | 0.20x |",
    ]
    assert "**net**" in text


def test_claims_of_papers_stand_beside_recorded_bits(tmp_path):
    (tmp_path / "results").mkdir()
    rows = [
        {"method": "turbo", "bits": "mixed", "sink_num": 0, "head_dim": dim, "tokens": n, "effective_bits": 3.2,
         "effective_bits_total": 3.2 + 3277 / n}
        for dim in (64, 128) for n in (512, 4096, 32768)
    ]  # fmt: skip
    head = {"command": "python bits.py", "date": "2030-01-02", "device": "CPU", "versions": {}}
    (tmp_path / "results" / "bits.json").write_text(json.dumps({"name": "bits", **head, "rows": rows}))
    text = tables.fill("<!-- table:claimed -->\n<!-- /table -->", tmp_path / "results")
    assert "| closed blocks | all, 4096 tokens | all, 32768 tokens |" in text
    assert "| over 4.4x |" in text and "| `turbo:bits=mixed,sink_num=0` | 5.00x | 4.00x | 4.85x |" in text
    assert len(text.splitlines()) == 5, "a method that nobody measured has no row"


def test_speed_tables_hold_the_rows_of_the_benches(tmp_path):
    (tmp_path / "results").mkdir()
    shape = {"bench": "prefill", "batch": 4, "tokens": 4096}
    rows = [
        {**shape, "way": "sdpa cudnn", "packed": False, "ms": 1.026},
        {**shape, "way": "sage2", "packed": True, "ms": 0.9},
    ]
    head = {"command": "python -m qattn_hf bench prefill", "date": "2030-01-02", "device": "GPU", "versions": {}}
    (tmp_path / "results" / "speed-prefill.json").write_text(json.dumps({**head, "rows": rows}))
    text = "".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in ("decode", "prefill", "decode-in-turn"))
    text = tables.fill(text, tmp_path / "results")
    assert "| SDPA, bf16 | 1.03 |" in text and "| `sage2` | 0.900 (1.14x) |" in text
    assert text.count("Not measured yet.") == 2


@pytest.mark.slow
def test_one_failing_part_costs_no_other(tmp_path, monkeypatch, capfd):
    """Results of the parts that work are written, the old result of the one that fails stays, the exit code tells."""
    ok, bad = (["python", "-c", code] for code in ("print('{\"ms\": 1}')", "print('{\"ms\": 2}'); raise SystemExit(3)"))
    monkeypatch.setattr(gpu, "parts", lambda *_: {"tests": [("a", bad)], "decode": [("b", ok)], "prefill": [("c", ok)]})
    old = tmp_path / "a.json"
    old.write_text("old")
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--only", "decode,tests", "--results", str(tmp_path)])
    assert ended.value.code == 1 and old.read_text() == "old"
    assert json.loads((tmp_path / "b.json").read_text())["rows"] == [{"ms": 1}]
    assert not (tmp_path / "c.json").exists(), "only what was chosen runs"
    said = capfd.readouterr().out
    assert "== a" in said and "a: FAILED" in said and "b: recorded" in said


@pytest.mark.slow
def test_parts_go_to_all_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = "import json, os; print(json.dumps({'gpu': os.environ.get('CUDA_VISIBLE_DEVICES')}))"
    command = ["python", "-c", code]
    assert gpu.record(("a", command), tmp_path, 1)[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == [{"gpu": "1"}]
    monkeypatch.setattr(gpu, "record", lambda part, results, gpu=None: (0, f"{part[0]} on {gpu}"))
    chosen = {"quality": [(name, command) for name in "abc"], "recipes": [("d", command)]}
    found = [said for _, said in gpu.run(chosen, tmp_path)]
    assert found == ["a on 0", "b on 1", "c on 0", "d on None"], "recipes spread themselves"


def test_gpu_parts_are_named_and_quality_is_called_as_before(tmp_path, capsys):
    (tmp_path / "models" / "net").mkdir(parents=True)
    (tmp_path / "data" / "books").mkdir(parents=True)
    (tmp_path / "data" / "books" / "heldout.txt").write_text("one\ntwo\nthree\n")
    families = gpu_parts.families()
    found = gpu_parts.parts(["--quick"], tmp_path, list(families), tmp_path)
    assert set(found) == set(gpu.KNOWN)
    [(name, command)] = found["prefill"]
    assert name == "speed-prefill" and command[:6] == ["python", "-m", "qattn_hf", "bench", "prefill", "--json"]
    assert command[-3:] == ["--method", measured_settings("prefill")[-1], "--quick"]
    recorded = runs_of(ROOT / "eval" / "results" / "quality-full-tiny-llama-28m.json")
    for name, command in found["quality"]:
        assert name.startswith("quality-full-net:") and command[-2] == "--methods"
        for record in (run for run in recorded if run["run"] == name.partition(":")[2]):  # none of a new method
            asked = [{"way": one} for one in split_methods([record["command"].split()[-1]])]
            then = spelled_now({**record, "name": "asked", "rows": asked})["rows"]
            assert set(split_methods([command[-1]])) == {row["way"] for row in then}
    assert len(found["quality"]) == len(found["tasks"]) == len(families)
    assert sum("fp" in split_methods([settings]) for settings in families.values()) == 1
    assert (tmp_path / "first-half.txt").read_text() + (tmp_path / "second-half.txt").read_text() == "one\ntwo\nthree\n"
    names = {name for name, _ in found["tables"]}
    assert "table-sinkq_sinks:net" in names and "table-turbo_sas:net" not in names, "that one reads no model"
    for arguments in (["--only", "speed"], ["--only", "quality"]):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
    said = capsys.readouterr().err
    assert "the parts are tests, released, recipes" in said and "needs --yardstick" in said


@pytest.mark.parametrize("family", ["kivi", "8bit"])
def test_settings_of_quality_are_those_of_the_tasks(tmp_path, family):
    """Every setting that the yardstick reads is asked for in lm-eval's tasks, as the command understands it."""
    from qattn_hf.cli.eval import chosen_recipes

    _, command = gpu_parts.tasks(tmp_path, tmp_path / "net", family)
    asked = [command[i + 1] for i, text in enumerate(command) if text == "--method"]
    assert len(chosen_recipes(asked, None)) == 3 and ("full" in asked) == (family == "8bit")


def test_every_mixed_recipe_is_shown_beside_its_parents():
    """A recipe that differs from a method's defaults must be worth its changes.

    Exceptions: `sage1` is an older version, and `turbo_paper` is a baseline.
    """
    mixed = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - set(list_methods()) - {"sage1", "turbo_paper"}
    assert mixed == set(recipes.PARENTS)
    assert list(recipes.pairs(["a:b=1/c"])) == [("a:b=1", "c")]
    for pair in recipes.pairs(None):
        for text in pair:
            method, _, settings = text.partition(":")
            find_recipe(None, method, dict(yaml.safe_load(f"{{{settings.replace('=', ': ')}}}") or {}))


def test_a_recipe_is_compared_row_by_row():
    model = object.__new__(recipes.Model)
    model.name = "net"
    model.readings = {
        "a": recipes.Reading(torch.tensor([1.0, 2.0, 3.0]), 4.0),
        "b": recipes.Reading(torch.tensor([2.0, 4.0, 6.0]), 5.0),
    }
    row = model.compare("a", "b")
    assert (row["kl"], row["parent_kl"], row["change"], row["bits"], row["parent_bits"]) == (2, 4, -2, 4, 5)
    assert row["se"] == pytest.approx(3**-0.5, abs=1e-6)  # differences -1, -2, -3


def test_tables_refuse_an_unknown_marker(tmp_path):
    with pytest.raises(KeyError, match="speed"):
        tables.fill("<!-- table:speed -->\n<!-- /table -->", tmp_path)


def test_conditions_tell_records_apart_and_keep_notes_that_are_asked_for(tmp_path):
    (tmp_path / "results").mkdir()
    head = {"versions": {"torch": "9.9", "python": "3.14"}, "rows": []}
    for i, (device, note) in enumerate((("GPU", "by hand"), ("CPU", None), ("GPU", "by hand"))):
        record = {"name": f"bits-{i}", "date": f"2030-01-0{i + 1}", "device": device, **head}
        text = json.dumps(record if note is None else {**record, "note": note})
        (tmp_path / "results" / f"bits-{i}.json").write_text(text)
    where = "Recorded on GPU, torch 9.9 (2030-01-01 to 2030-01-03); CPU, torch 9.9 (2030-01-02). Commands and versions"
    files = "`eval/results/bits*.json`."
    assert conditions(tmp_path / "results", "bits*") == f"{where}, with notes: {files}"
    noted = conditions(tmp_path / "results", "bits*", notes=True)
    assert noted.splitlines() == [f"{where}: {files}", "", "- `bits-0`, `bits-2`: by hand."]


def test_check_fails_on_a_stale_file_and_writes_nothing(tmp_path):
    """Any of the front page, a page of docs/, and the navigation; a method's page is stale where it is missing."""
    results = write_results(tmp_path / "results")
    (tmp_path / "docs").mkdir()
    files = {
        "README.md": README,
        "docs/page.md": README,
        "mkdocs.yml": "  # <!-- table:nav-methods -->\n  # <!-- /table -->\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    arguments = ["--root", str(tmp_path), "--results", str(results)]
    with pytest.raises(SystemExit, match=r"stale: docs/methods/fp8\.md.*README\.md, mkdocs\.yml, docs/page\.md"):
        tables.main([*arguments, "--check"])
    assert {name: (tmp_path / name).read_text() for name in files} == files
    tables.main(arguments)
    tables.main([*arguments, "--check"])
    assert "\n      - turbo: methods/turbo.md\n" in (tmp_path / "mkdocs.yml").read_text()
    assert "| `k_bits` | 4, 2, mixed or null | `null` |" in (tmp_path / "docs" / "methods" / "turbo.md").read_text()


def test_generated_parts_of_readme_and_docs_are_up_to_date():
    tables.main(["--check"])


def test_bits_come_from_filled_caches(capsys):
    script("bits").main(["--tokens", "200", "--head-dims", "64"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    bits = {(row["method"], row.get("bits", "")): row["effective_bits"] for row in rows}
    assert all(row["packed_tokens"] > 0 and row["effective_bits_total"] >= row["effective_bits"] for row in rows)
    assert 4 < bits["turbo", ""] < 4.3 and 2 < bits["turbo", 2] < 2.3
    assert bits["turbo", 2] < bits["turbo", "mixed"] < bits["turbo", ""] < bits["int8", ""] < bits["none", ""]
