"""Scripts of `eval/` that measure speed or show it: kernels for a sanitizer, sparse V, pictures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

EVAL = Path(__file__).resolve().parent.parent / "eval"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script of `eval/` by its name."""
    monkeypatch.syspath_prepend(EVAL)
    return importlib.import_module


def test_every_kernel_closes_blocks(script, capsys):
    script("every_kernel").main(["--method", "kivi:bits=2,group_size=128,residual_length=32"])
    row = json.loads(capsys.readouterr().out)
    assert row["finite"] and row["closed_blocks"] == 4


@pytest.mark.slow
def test_sparse_v_is_judged_against_reading_every_value(script, monkeypatch):
    from qattn_hf.assets import demo_model_dir
    from qattn_hf.bench.model import load_model

    model, ids = load_model(str(demo_model_dir()), torch.device("cpu")).float(), torch.randint(2, 4096, (1, 150))
    sparse_v_speed = script("sparse_v_speed")
    monkeypatch.setattr(sparse_v_speed, "TAUS", sparse_v_speed.TAUS[::2])
    rows = list(sparse_v_speed.measured(model, "turbo", ids))
    assert [row["tau"] for row in rows] == list(sparse_v_speed.TAUS) and rows[0]["kl"] == 0
    assert all(row["ms"] > 0 for row in rows) and rows[-1]["skip_rate"] > rows[1]["skip_rate"] > 0
    assert rows[-1]["kl"] > 0 and not hasattr(model, "_qattn")


def test_pictures_show_the_recorded_rows(script):
    pictures = script("pictures")
    image = pytest.importorskip("PIL.Image", reason="pictures need matplotlib, which brings Pillow")
    rows, where = pictures.decode_rows(pictures.RESULTS)
    with image.open(pictures.DECODE) as picture:
        assert picture.text["Source"] == pictures.digest(rows), "stale: run python eval/pictures.py"
    with image.open(pictures.LOSS) as picture:
        assert picture.text["Source"] == pictures.digest(pictures.loss_rows(pictures.RESULTS)), "stale, as above"
    assert where and {row["batch"] for row in rows} == set(pictures.BATCHES)


@pytest.mark.slow
def test_a_generation_outgrows_its_memory(script, capsys):
    script("budget").main(["--quick"])
    row = json.loads(capsys.readouterr().out)
    assert row["tokens"] == 800 and row["bf16_bytes"] > 4 * row["memory"] >= 4 * row["most_bytes"]
    bits = [change["v"] for change in row["changes"]]
    assert bits[0][0][0] == 8 and bits[-1][0][0] == 2 and row["effective_bits"] < 4


def test_latent_attention_is_timed_beside_stock(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["latent_speed.py", "--quick"])
    script("latent_speed").main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["method"] for row in rows} == {"stock", "int8", "turbo", "turbo:bits=2"}
    assert all(row["ms"] > 0 for row in rows) and {row["new_tokens"] for row in rows} == {1, 64}


@pytest.mark.slow
def test_beams_and_drafts_are_timed_with_drafts_that_are_all_accepted_or_none(script, capsys):
    beams_speed, new = script("beams_speed"), 12
    options = ["--quick", "--context", "110", "--new-tokens", str(new), "--way", "stock", "--way", "none eager"]
    beams_speed.main([*options, *(f"--case={case.what}" for case in beams_speed.CASES[1:])])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    whats = [case.what for case in beams_speed.CASES[1:]]
    assert sorted((row["way"], row["what"]) for row in rows) == sorted(
        (way, what) for way in ("stock", "none eager") for what in whats
    )
    assert all(row["decode"] == "eager" and row["ms"] > 0 for row in rows)
    assert {row["calls"] for row in rows if "all accepted" in row["what"]} == {2}, "of 5, 5 and 2 tokens"
    assert {row["calls"] for row in rows if "all accepted" not in row["what"]} == {new - 1}
    assert {row["draft_decode"] for row in rows if row["what"].startswith("draft model")} == {"eager"}


def test_eager_calls_are_timed_beside_stocks(script, capsys):
    options = ["--quick", "--layers", "1", "--context", "70", "--prompts", "3", "--pairs", "2", "--methods", "int8"]
    script("eager_speed").main(options)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["what"], row["tokens"], row["pairs"]) for row in rows] == [("step", 70, 2), ("prompt", 3, 2)]
    assert all(row["low"] <= row["ratio"] <= row["high"] and row["ms"] > 0 and row["stock_ms"] > 0 for row in rows)


def test_methods_are_timed_in_turn_beside_the_first(script, capsys):
    decode_in_turn, methods = script("decode_in_turn"), ["int8:compute=model", "int8"]
    decode_in_turn.main(["--points", "1x96", "--rounds", "2", "--methods", ",".join(methods)])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch"], row["context"], row["way"]) for row in rows] == [(1, 96, way) for way in methods]
    assert all(row["ms_low"] <= row["ms"] <= row["ms_high"] and row["rounds"] == 2 for row in rows)
    assert rows[0]["ratio"] == 1 and rows[1]["ratio_low"] <= rows[1]["ratio"] <= rows[1]["ratio_high"]
    with pytest.raises(SystemExit):
        decode_in_turn.main(["--rounds", "1"])


@pytest.mark.slow  # tests/test_bench.py times generate
def test_generate_is_timed_on_one_gpu_and_on_several(script, capsys, tmp_path):
    """A CPU takes the place of one GPU. `tests/test_parallel_cuda.py` splits models."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    ways = ["--way", "DynamicCache", "--way", "turbo eager"]
    script("several_gpus").main([str(tmp_path / "config.json"), "--point", "1x100", *ways, "--new-tokens", "4"])
    stock, packed = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert stock["gpus"] == packed["gpus"] == 1 and stock["split"] == packed["split"] == "none"
    assert packed["impl"] == "reference" and stock["ms_per_token"] > 0
    assert script("several_gpus").shares(script("several_gpus").AutoConfig.from_pretrained(tmp_path), 2)[1] > 0


def test_a_prefix_is_moved(script, capsys, tmp_path):
    from qattn_hf.bench.model import TINY

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **TINY}))
    ways = ["--method", "none", "--method", "turbo"]
    script("move_prefix").main([str(config), "--tokens", "400", "--folder", str(tmp_path), *ways])
    full, packed = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (
        full["bytes_per_token"] > 2 * 2 * TINY["num_key_value_heads"] * TINY["head_dim"] * 2
    )  # bf16 K and V, 2 layers
    assert packed["bytes"] < full["bytes"] and packed["load_s"] > 0 and packed["save_s"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
