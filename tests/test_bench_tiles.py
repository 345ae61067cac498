"""`qattn bench tiles`: which tiles it tries, which it keeps, and that later launches take them. The timer is a fake."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import bench

from qattn_hf.bench import tables, tiles
from qattn_hf.bench.layers import Heads
from qattn_hf.cli.bench import chosen_methods
from qattn_kernels.chip import H200, as_chip, chip_with
from qattn_kernels.launch import tuned
from qattn_kernels.launch.tuned import FOLDER, Prefill
from qattn_kernels.step.tiles import Use, candidates, uses
from qattn_kernels.step.warm import LayerShape

CPU, HEADS = torch.device("cpu"), Heads(4, 2, 128, torch.bfloat16)
POINTS = [tiles.Point(1, 96), tiles.Point(2, 64)]
RTX = chip_with(86)._replace(name="NVIDIA GeForce RTX 3090")
SMALL = Prefill(32, 32, 8, 3)
__all__ = ["bench"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of the user's own files, and files read anew before and after."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def shape(method: str) -> LayerShape:
    spec = chosen_methods([method])[method].last_layer_spec(HEADS.kv)
    return LayerShape(spec, HEADS.query, HEADS.kv, HEADS.dim, HEADS.dtype, CPU)


def in_use(method: str) -> Prefill:
    found = uses(shape(method))
    assert isinstance(found, list)
    return next(use.tiles for use in found if use.tiles is not None)


def measured(best: Prefill, ms: float) -> list[dict[str, Any]]:
    """Rows of int8 and none on the RTX 3090, where `best` takes `ms` and everything else 1."""

    def timer(point: tiles.Point, *_: Any) -> dict[str, Any]:
        tried = in_use("none")
        if tried.stages == 4:
            raise RuntimeError("out of resources")
        return {"ms": ms if tried == best else 1.0}

    with as_chip(RTX):
        return list(tiles.rows(POINTS, chosen_methods(["none"]), HEADS, CPU, timer))


def test_the_one_in_use_is_measured_first_and_all_fit():
    with as_chip(RTX):
        for method in ("int8", "none"):
            tried = list(candidates(shape(method)))
            assert tried[0] == in_use(method)
            assert len(set(tried)) == len(tried) > 10
    with as_chip(H200):
        assert len(list(candidates(shape("none")))) > len(tried), "a larger GPU has room for more"


def test_the_fastest_is_kept_and_later_launches_take_it(folder: Path):
    rows = measured(SMALL, 0.5)
    assert tiles.best(rows) == {("half", 128): SMALL}
    with as_chip(RTX):
        before = in_use("int8")
        file = tiles.keep(rows, CPU)
        assert file == folder / "nvidia-geforce-rtx-3090.json"
        assert in_use("none") == SMALL and in_use("int8") == before
    with as_chip(RTX._replace(name="NVIDIA RTX A6000")):
        assert in_use("none") == SMALL, "a GPU of this capability has no file for its name"
    with as_chip(chip_with(89)):
        assert in_use("none") != SMALL
    assert len(json.loads(file.read_text())["measured"]["rows"]) == len(rows)


def test_measuring_other_heads_keeps_what_the_file_has(folder: Path):
    rows = measured(SMALL, 0.5)
    with as_chip(RTX):
        tiles.keep(rows, CPU)
        tiles.keep([{**row, "dim": 64} for row in rows], CPU)
        assert tuned.tuned_for(RTX).prefill == {("half", 128): (SMALL,), ("half", 64): (SMALL,)}


@pytest.mark.parametrize("ms", [0.99, 1.0, 3.0, math.inf])
def test_tiles_that_are_hardly_faster_are_not_kept(ms: float):
    assert tiles.best(measured(SMALL, ms)) == {}


def test_tiles_that_fail_at_a_point_are_out():
    rows = measured(SMALL, 0.5)
    failed = next(row for row in rows if "error" not in row and row["tokens"] == 64 and row["bn"] == SMALL.bn)
    assert all("error" in row for row in rows if row["stages"] == 4)
    wrong = [{**row, "ms": math.inf} if tiles.config_of(row) == SMALL and row is not failed else row for row in rows]
    assert tiles.best(wrong) == {}


def test_the_table_has_the_fastest_first():
    header, lines = tables.table(measured(SMALL, 0.5))
    assert header[-1] == "ms" and lines[0] == ["1 x 96", "none", "half", "32", "32", "8", "3", "64", "0.5000"]
    assert lines[-1][-1] == "failed"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefill": {"half": {"128": [{**SMALL._asdict(), "bn": 48}]}}}, "bn is 48"),
        ({"capability": None}, "TypeError"),
    ],
)
def test_a_file_that_kernels_cannot_take_is_an_error(folder: Path, change: dict[str, Any], said: str):
    table = json.loads(tuned.as_text(tuned.tuned_for(H200)._replace(gpu=RTX.name)))
    file = folder / tuned.file_name(RTX.name)
    file.write_text(json.dumps({**table, **change}))
    with pytest.raises(ValueError, match=f"{file.name} has no launch configurations.*{said}.*Fix: remove it"):
        tuned.tuned_for(RTX)


def test_uses_names_kernels_or_the_reason():
    with as_chip(RTX):
        found = uses(shape("turbo"))
        assert {use.kernel for use in found if isinstance(use, Use)} >= {"attend", "decode_kernel", "short_kernel"}
        assert str(uses(shape("sage2"))).startswith("FP8 products need compute capability 8.9")


def test_a_cpu_has_no_tiles(bench: Any):
    code, out, err = bench("tiles")
    assert code == 2 and not out and "Fix: run it where torch finds one" in err
