"""The tables of settings, joined from several records, and what the front page recommends."""

from __future__ import annotations

import json

from test_docs import ROOT
from test_eval_scripts import tables


def test_the_overview_joins_what_was_recorded_of_a_setting(tmp_path):
    (tmp_path / "results").mkdir()

    def record_rows(name: str, *rows: dict) -> None:
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": rows}))

    held = {"head_dim": 128, "kv_heads": 8, "tokens": 32768}
    turbo, int8 = {"method": "turbo", "bits": 2}, {"method": "int8"}
    record_rows(
        "bits",
        {**int8, **held, "effective_bits": 8.25, "effective_bits_total": 8.26},
        {**turbo, **held, "effective_bits": 2.26, "effective_bits_total": 2.29},
    )
    loss = {"same_top1": 0.9, "bits": 8.5}
    record_rows("released-smollm2", {"setting": "int8", "kl": 0.0022, **loss}, {"setting": "fp8", "error": "no"})
    record_rows("released-gemma3", {"setting": "turbo:bits=2", "kl": 0.1, **loss, "bits": 3.4})
    point = {"batch": 16, "context": 32768, "room": 1}
    ways = {"sdpa flash": 3.0, "sdpa cudnn packed": 2.0, "int8": 1.0, "turbo:bits=2": 0.8}
    timed = [{**point, "way": way, "ms": ms, "packed": way in ("int8", "turbo:bits=2")} for way, ms in ways.items()]
    record_rows("speed-decode", *timed, {**timed[2], "room": 4, "ms": 9.0})
    lines = tables.TABLES["settings"](tmp_path / "results").splitlines()[2:]
    assert lines == [
        "| `turbo:bits=2` | 2.26 | 2.29 |  |  |  |  | 2.50x |  |  |  |",  # measured in 3.4 bits: another format's KL
        "| `int8` | 8.25 | 8.26 | 0.0022 | 0.900 |  |  | 2.00x |  |  |  |",
    ]
    assert tables.TABLES["overview"](tmp_path / "results").splitlines()[2:] == lines[1:]
    record_rows("front-decode", {**timed[1], "ms": 4.0}, {**timed[2], "ms": 1.0})
    assert "4.00x" in tables.TABLES["overview"](tmp_path / "results"), "the record of the front page counts first"


def test_the_fastest_decode_is_worked_out_of_records(tmp_path):
    (tmp_path / "results").mkdir()
    sizes = {"head_dim": 128, "kv_heads": 8, "tokens": 32768, "effective_bits": 4.3, "effective_bits_total": 4.4}
    names = ("turbo", "nf4")
    bits = [{"method": name, **sizes} for name in names]
    timed = []
    for context, times in ((512, (1.0, 2.0)), (4096, (1.0, 0.9)), (8192, (1.0, 1.1))):
        point = {"batch": 1, "context": context, "room": 1}
        timed.append({**point, "way": "sdpa cudnn", "ms": 3.0, "packed": False})
        timed += [{**point, "way": name, "ms": ms, "packed": True} for name, ms in zip(names, times, strict=True)]
    for name, rows in (("bits", bits), ("speed-decode", timed)):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": rows}))
    assert tables.TABLES["fastest"](tmp_path / "results").splitlines()[2:] == [
        "| 4 bits | `turbo` | 2 of 3 | 1 x 512, 1 x 8192 |",
        "| 4 bits | `nf4` | 1 of 3 | 1 x 4096 |",
    ]


def test_the_least_loss_of_a_width_is_worked_out_of_records(tmp_path):
    """By the larger of two checkpoints' KL; what one did not measure, or in other bits, does not count."""
    (tmp_path / "results").mkdir()
    sizes = {"head_dim": 128, "kv_heads": 8, "tokens": 32768, "effective_bits_total": 8.4}
    bits = {"int8": 8.25, "sage2": 8.26, "fp8": 8.25, "turbo": 4.26}
    losses = {
        "released-smollm2": {"int8": 0.001, "sage2": 0.002, "turbo": 0.01, "fp8": 0.0001},
        "released-gemma3": {"int8": 0.005, "sage2": 0.003, "turbo": 0.02},
    }
    rows = [{"method": name, "effective_bits": found, **sizes} for name, found in bits.items()]
    records = {"bits": rows} | {
        record: [{"setting": name, "kl": kl, "same_top1": 0.9, "bits": bits[name]} for name, kl in found.items()]
        for record, found in losses.items()
    }
    for name, found in records.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": found}))
    assert tables.TABLES["least"](tmp_path / "results").splitlines()[2:] == [
        "| 9 | `sage2` | 8.26 | 0.0020 | 0.900 | 0.0030 | 0.900 |",
        "| 7 | `turbo` | 4.26 | 0.0100 | 0.900 | 0.0200 | 0.900 |",
        "| 5 | `turbo` | 4.26 | 0.0100 | 0.900 | 0.0200 | 0.900 |",
    ]


def test_the_front_page_names_the_safe_8_bits_by_record():
    """What README calls the smallest loss at 8 bits is what the records say, over both checkpoints."""
    first = tables.TABLES["least"](ROOT / "eval" / "results").splitlines()[2]
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if "the smallest loss at 8 bits" in line]
    assert first.split(" | ")[1].strip("`") == line.split("`")[1]
