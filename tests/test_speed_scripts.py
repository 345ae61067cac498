"""Scripts of `eval/` that measure speed or show it: kernels for a sanitizer, sparse V, pictures, slopes."""

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


def test_sparse_v_is_judged_against_reading_every_value(script):
    from qattn_hf.assets import demo_model_dir
    from qattn_hf.bench.model import load_model

    model, ids = load_model(str(demo_model_dir()), torch.device("cpu")).float(), torch.randint(2, 4096, (2, 150))
    sparse_v_speed = script("sparse_v_speed")
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
    assert where and {row["batch"] for row in rows} == set(pictures.BATCHES)


@pytest.mark.parametrize("points, wanted", [({0: 1.0, 1000: 1.5}, 500), ({512: 0.1, 2048: 0.1, 8192: 0.1}, 0)])
def test_a_slope_is_in_microseconds_a_thousand_tokens(script, points, wanted):
    assert script("speed_tables").slope(points) == pytest.approx(wanted)
