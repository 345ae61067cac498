"""The command line: help for newcomers, output, and errors."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qattn_hf import QAttnCache, list_methods, patch
from qattn_hf.assets import demo_model_dir
from qattn_hf.cli import main, one_line
from qattn_hf.cli._prompts import PROSE, Prompt, demo_prompts, is_right
from qattn_hf.cli.bench import CPU_NOTE
from qattn_hf.messages import size
from qattn_hf.methods import Method, get_method
from qattn_hf.recipes.settings import as_written, values_of
from qattn_hf.recipes.spelling import parse_settings

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 64


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny random Llama that reads with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        initializer_range=0.2,  # large enough for answers that are not one token over and over
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def qattn(qattn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    return qattn


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ["demo", "generate", "cache", "methods", "--debug", "show the version and exit."]),
        (("demo",), ["MODEL", "--method", "--set", "--json", "--output", "full precision", "qattn demo --method"]),
        (
            ("generate",),
            ["MODEL", "--prompt", "--method", "--recipe", "--set", "--max-new-tokens", "--chat", "--dtype"],
        ),
        (("cache", "report"), ["MODEL", "--method", "--recipe", "--set", "--text", "--tokens", "--json"]),
        (("methods",), ["settings"]),
        (
            ("eval",),
            ["--task", "--method", "--recipe", "--limit", "--data-dir", "--confirm-run-unsafe-code", "--output"],
        ),
    ],
)
def test_help_names_every_option(qattn, command, words):
    code, out, err = qattn(*command, "--help")
    assert code == 0 and err == ""
    assert [word for word in words if word.lower() not in out.lower()] == []


def test_no_command_shows_the_help(qattn):
    code, out, _ = qattn()
    assert code == 0 and "Usage: qattn" in out and "qattn demo" in out


def test_methods_lists_what_is_found(qattn):
    code, out, _ = qattn("methods")
    assert code == 0
    for name in list_methods():
        assert f"{name}:" in out
        assert all(setting in out for setting in get_method(name).model_fields)
    assert Method.model_fields["softmax"].description in out


def settings_table(out: str) -> dict[str, list[str]]:
    """`allowed`, `default`, `reference only` and `what it is` of each setting; a cell may have several lines."""
    rows: dict[str, list[str]] = {}
    for line in (line for line in out.splitlines() if line.startswith("│")):
        setting, *cells = (cell.strip() for cell in line.strip("│").split("│"))
        before = list(rows.values())[-1] if not setting else [""] * len(cells)
        joined = [f"{first} {more}".strip() for first, more in zip(before, cells, strict=True)]
        rows[setting or list(rows)[-1]] = joined
    return rows


@pytest.mark.parametrize("name", list_methods())
def test_methods_says_all_about_one(qattn, name):
    code, out, _ = qattn("methods", name)
    assert code == 0 and out.lstrip().startswith(f"{name}: ")
    rows, fields = settings_table(out), get_method(name).model_fields
    assert set(rows) == set(fields)
    for key, field in fields.items():
        assert all(as_written(value) in rows[key][0] for value in values_of(field.annotation))
        assert rows[key][1] == as_written(field.default) and rows[key][3] == field.description
    assert f"Recipe {name}: the defaults" in out and "Computed by: Triton kernels" in out


def test_methods_names_bounds_recipes_and_what_the_reference_computes_alone(qattn):
    _, out, _ = qattn("methods", "turbo")
    rows = settings_table(out)
    assert rows["sink_num"][0] == "integer, 0 to 8" and rows["sas_threshold"][0] == "number, below 0"
    assert rows["bits"][:3] == ["4, 2, mixed", "4", ""] and rows["block_kv"][2] == "32"
    assert "Recipe turbo_sink: the defaults" in out and "Recipe turbo_paper: sink_num=0" in out
    assert qattn("methods", "turbo_sink")[1] == out, "a recipe's name shows its method"
    code, _, err = qattn("methods", "trubo")
    assert code == 2 and "did you mean 'turbo'?" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "--prompt", "hi", "--method", "trubo"], 2, "turbo"),
        (["generate", "--prompt", "hi", "--set", "bitz=4"], 2, "bitz"),
        (["generate", "--prompt", "hi", "--set", "bits=3"], 2, "bits"),
        (["generate", "--prompt", "hi", "--set", "bits"], 2, "KEY=VALUE"),
        (["cache", "report", "--set", "bits=2", "--set", "bits=4"], 2, "bits is given twice"),
        (
            ["cache", "report", "--set", 'layers={"0": {"bits": 2, "bits": 4}}'],
            2,
            "--set layers, line 1: bits is given twice",
        ),
        (["cache", "report", "--set", f"k_low_heads={'[' * 9000}{']' * 9000}"], 2, "--set k_low_heads, line 1: lists"),
        (["generate", "--prompt", "hi", "--recipe", "missing.yaml"], 2, "missing.yaml"),
        (["generate", "./missing", "--prompt", "hi"], 1, "./missing"),
        (["generate"], 2, "prompt"),
        (["cache", "report", "--text", "missing.txt"], 1, "missing.txt"),
        (["cache", "report", "--tokens", "none"], 2, "--tokens"),
        (["generate", "--prompt", "hi", "--device", "gpu"], 2, "--device gpu is unknown. Fix: give cpu"),
        (["generate", "--prompt", "hi", "--device", "cuda:99"], 2, "Fix: --device cpu"),
        (["generate", "--prompt", "hi", "--chat"], 2, "no chat template. Fix: leave --chat out"),
        (["demo", "--method", "trubo"], 2, "turbo"),
        (["bogus"], 2, "bogus"),
        (["bench", "decode", "--heads", "0"], 2, "--heads 0"),
        (["eval"], 2, "--task is missing"),
        (["tune", "--output", "tuned.json"], 2, "--output tuned.json"),
        (["cache", "info", "missing.safetensors"], 1, "missing.safetensors"),
        (["cache", "info", __file__], 1, "no whole safetensors file"),
    ],
)
def test_an_error_is_one_line(qattn, arguments, code, said):
    got, out, err = qattn(*arguments)
    assert got == code and out == ""
    err = err.removeprefix(f"{CPU_NOTE}\n")
    assert err.startswith("qattn: ") and err.count("\n") == 1 and err.endswith("\n")
    assert said.lower() in err.lower()


LARGE = ("torch", "transformers", "numpy", "huggingface_hub")


QUICK = [
    (["--help"], 0),
    (["--version"], 0),
    (["bench", "decode", "--help"], 0),
    (["compare", "--help"], 0),
    (["bogus"], 2),
    (["compare", "--bogus"], 2),
    (["cache", "report", "--tokens", "none"], 2),
    (["generate"], 2),
    (["eval"], 2),
    (["methods", "trubo"], 2),
    (["demo", "--method", "trubo"], 2),
    (["cache", "report", "--recipe", "trubo_sink"], 2),
    (["doctor", "--compile", "--set", "bits"], 2),
    (["compare", "--method", "turbo:k_bits=4,v_bits=2,kivvi"], 2),
    (["eval", "--task", "gsm8k_cot", "--method", "full,turbo:bits"], 2),
]


def test_help_and_usage_errors_load_nothing_large():
    """torch and transformers take seconds, which somebody who mistyped an option would wait for."""
    program = f"""
import sys
import qattn_hf
from qattn_hf.cli import main
for arguments, code in {QUICK!r}:
    try:
        main(arguments)
    except SystemExit as ended:
        assert (ended.code or 0) == code, (arguments, ended.code)
    loaded = [name for name in {LARGE!r} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_every_public_name_is_there():
    import qattn_hf

    assert set(qattn_hf.__all__) <= set(dir(qattn_hf))
    for name in qattn_hf.__all__:
        assert getattr(qattn_hf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        _ = qattn_hf.pach


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="KEY=VALUE"):
        main(["--debug", "generate", "--prompt", "hi", "--set", "bits"])


def test_one_line_of_an_error():
    assert one_line(ValueError("a\n  b\n\nsecond paragraph")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(FileNotFoundError(2, "No such file", "x.txt")) == "x.txt: No such file"


def test_settings_are_read_as_a_recipe_would():
    assert parse_settings(["k_bits=4", "softmax=sas", "tau=1e-4", "budget=.inf", "n_h=null"]) == {
        "k_bits": 4,
        "softmax": "sas",
        "tau": 1e-4,
        "budget": float("inf"),
        "n_h": None,
    }
    assert parse_settings(None) == {}


def test_size_of_bytes():
    assert [size(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


def test_generate_prints_the_models_answer(qattn, model_dir):
    """`none` keeps the model's precision, so the answer is the stock model's."""
    code, out, err = qattn("generate", model_dir, "--prompt", PROSE, "--method", "none", "--max-new-tokens", "8")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(PROSE, return_tensors="pt").input_ids
    stock = AutoModelForCausalLM.from_pretrained(model_dir).generate(ids, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(stock[0, ids.shape[1] :], skip_special_tokens=True)
    assert code == 0 and err.startswith(f"loading {model_dir}\n")
    assert out.startswith(expected) and len(expected) > 8
    assert "[none: " in out.splitlines()[-1] and "tokens packed" in out.splitlines()[-1]


def test_generate_takes_a_recipe_and_settings(qattn, model_dir, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("method: turbo\nbits: 2\n")
    common = ["generate", model_dir, "--prompt", PROSE, "--recipe", str(recipe), "--max-new-tokens", "2"]
    lines = [qattn(*common)[1].splitlines()[-1], qattn(*common, "--set", "bits=4")[1].splitlines()[-1]]
    assert "2.27 bits a value where packed" in lines[0] and "4.27 bits" in lines[1]


def test_report_counts_the_tokens_asked_for(qattn, model_dir):
    code, out, _ = qattn("cache", "report", model_dir, "--method", "turbo", "--tokens", "200", "--json")
    data = json.loads(out)
    assert code == 0 and data["method"] == "turbo"
    assert data["packed_tokens"] == 192 and data["open_tokens"] == 8
    assert len(data["layers"]) == LAYERS
    assert data["kv_bytes_full_precision"] == 200 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def test_report_reads_a_text_and_prints_a_table(qattn, model_dir, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text(PROSE)
    n = len(AutoTokenizer.from_pretrained(model_dir)(PROSE).input_ids)
    code, out, _ = qattn("cache", "report", model_dir, "--method", "turbo", "--text", str(text))
    assert code == 0
    assert f"{n // 64 * 64} packed and {n % 64} open" in out


def test_report_of_an_empty_text_is_an_error(qattn, model_dir, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    code, _, err = qattn("cache", "report", model_dir, "--text", str(tmp_path / "empty.txt"))
    assert code == 1 and "holds no text" in err


def test_cache_builds_a_file_and_says_what_it_holds(qattn, model_dir, tmp_path):
    text, file = tmp_path / "book.txt", tmp_path / "prefix.safetensors"
    text.write_text(PROSE)
    code, out, _ = qattn("cache", "build", model_dir, "--method", "kivi:bits=4", "--text", str(text), "-o", str(file))
    assert code == 0 and "kivi: " in out and out.endswith(f"{file}: {size(file.stat().st_size)}\n")
    data = json.loads(qattn("cache", "info", str(file), "--json")[1])
    model = patch(AutoModelForCausalLM.from_pretrained(model_dir).eval(), "kivi", bits=4)
    ids = AutoTokenizer.from_pretrained(model_dir)(PROSE, return_tensors="pt").input_ids
    loaded = QAttnCache.load(file, model=model)
    assert torch.equal(loaded.input_ids, ids) and data["tokens"] == ids.shape[1] == int(loaded.get_seq_length())
    assert data["bytes"] == file.stat().st_size and data["method"] == "kivi" and data["layers"] == LAYERS
    out = qattn("cache", "info", str(file))[1]
    assert f"{ids.shape[1]} tokens in 1 row, with their ids" in out and "recipe: {method: kivi, bits: 4, " in out


@pytest.fixture(scope="module")
def demo_output(model_dir, tmp_path_factory):
    """What `qattn demo --method METHOD` prints and writes, run once a method."""
    folder, seen = tmp_path_factory.mktemp("demo"), {}

    def run(method: str):
        if method not in seen:
            target, out = folder / f"{method}.json", io.StringIO()
            with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
                main(["demo", model_dir, "--method", method, "--max-new-tokens", "6", "--output", str(target)])
            assert not ended.value.code
            seen[method] = (out.getvalue(), json.loads(target.read_text()))
        return seen[method]

    return run


def test_demo_compares_each_prompt(demo_output):
    out, data = demo_output("turbo")
    assert [row["prompt"]["name"] for row in data["prompts"]] == [p.name for p in demo_prompts()]
    for row in data["prompts"]:
        assert row["packed_tokens"] > 0 and row["effective_bits"] < 4.3
        assert 0 <= row["agreement"] <= 1 and (row["agreement"] == 1) == (row["first_difference"] is None)
        assert row["kl"] > 0, "a packed cache changes the logits; zero would mean that nothing was read from it"
        cached = row["prompt_tokens"] + row["answer_tokens"] - 1
        assert row["kv_bytes_full_precision"] == cached * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    verdict, following = out.splitlines()[-2:]
    assert verdict.startswith("Verdict: turbo ") and following.startswith("Next: ")
    speeds = [data["total"][key] for key in ("tokens_per_second", "tokens_per_second_full_precision")]
    assert "at {:.0f} tokens a second instead of {:.0f}".format(*speeds) in verdict
    assert all(row["packed_answer_tokens"] == 6 for row in data["prompts"])
    rates = [row["tokens_per_second"] for row in data["prompts"]]
    assert speeds[0] == pytest.approx(len(rates) / sum(1 / rate for rate in rates))  # answers are of one length


def test_demo_finds_no_difference_where_there_is_none(demo_output):
    _, data = demo_output("none")
    for row in data["prompts"]:
        assert row["packed"] == row["full_precision"] and row["agreement"] == row["same_top1"] == 1
        assert abs(row["kl"]) < 1e-6


def test_demo_that_packs_nothing_fails(qattn, model_dir, monkeypatch):
    monkeypatch.setattr("qattn_hf.cli._prompts.demo_prompts", lambda: [Prompt("short", "Once upon a time", 4)])
    code, out, err = qattn("demo", model_dir)
    assert code == 1 and "packed nothing" in err
    assert "Verdict" not in out


def test_demo_prompts_are_the_same_every_time_and_marked():
    assert demo_prompts() == demo_prompts() != demo_prompts(seed=1)
    total = Prompt("sum", "...", 8, gold="41")
    assert is_right(total, "14 / 2 = 7. 7 + 34 = 41.\n#### 41") and not is_right(total, "#### 40")
    assert is_right(total, " 41.") and is_right(Prompt("prose", "...", 8), "anything") is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal, which Windows has not")
def test_demo_shows_progress_on_a_terminal(model_dir):
    import os
    import pty

    process, terminal = pty.fork()
    if process == 0:  # the new process, which has all modules
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ["TERM"] = "xterm"
        torch.set_num_threads(1)  # threads of the parent are not here
        try:
            main(["demo", model_dir, "--max-new-tokens", "4"])
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        finally:
            os._exit(1)
    shown = b""
    with contextlib.suppress(OSError):  # reading fails when the command has ended and its terminal is gone
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0, shown.decode(errors="replace")
    text = shown.decode(errors="replace")
    assert "full precision: sum 1" in text and "packed: prose" in text and "comparing: prose" in text
    assert text.rstrip().splitlines()[-1].startswith("Next: ")


def test_kernels_are_compiled_for_a_gpu_alone(qattn):
    code, out, err = qattn("doctor", "--compile", "--device", "cpu")
    assert code == 2 and not out and "finds none" in err


def test_nothing_is_compiled_for_what_packs_nothing(qattn):
    code, out, err = qattn("doctor", "--compile", "--method", "sage2:cache=model", "--device", "cpu")
    assert code == 1 and not out and "packs nothing" in err
