"""Draw the pictures of the documentation from recorded rows: `python eval/pictures.py`.

Each PNG file carries a digest of the rows that it shows, so that a test sees when it is stale.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from recorded import load

from qattn_hf.bench.picture import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DECODE = ROOT / "docs" / "results" / "decode.png"
SHOWN = ("turbo:sink_num=0", "int8", "sinkq", "kivi:bits=2,group_size=128,residual_length=32")
BATCHES = (1, 16)


def decode_rows(results: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows of the decode bench that are drawn, and on what they were recorded."""
    (result,) = load(results, "speed-decode")
    rows = [row for row in result["rows"] if row["batch"] in BATCHES and (not row["packed"] or row["way"] in SHOWN)]
    return rows, f"{result['device']}, torch {result['versions']['torch']}"


def digest(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of rows."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def main() -> None:
    rows, where = decode_rows(RESULTS)
    draw(rows, DECODE, where, {"Source": digest(rows)})


if __name__ == "__main__":
    main()
