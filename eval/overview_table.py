"""What each setting keeps, loses and gains, together out of several records: the front page, and a table of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from recorded import asked, load, markdown

from qattn_hf.bench.tables import by_point, gains

EMBEDDED = "compare-embedded-model"  # the record that anyone can make again
CONTEXT, HEAD_DIM = 32768, 128
# on the front page, in this order; each has a record by every instrument
FRONT = (
    "int8",
    "sage2",
    "turboquant:k_format=turbo4",
    "turbo",
    "turboquant:k_format=turbo3,v_format=turbo3",
    "sinkq",
    "kivi:bits=2,group_size=128,residual_length=32",
)
# ways of `generate` on the front page, by their headings
WAYS = {
    "turbo graph": "`turbo`",
    "StaticCache": "StaticCache, compiled",
    "DynamicCache": "DynamicCache",
    "floor, captured": "no attention, captured",
}
# ways of `throughput` there, likewise
THROUGHPUT = {
    "kivi:bits=2,group_size=128,residual_length=32 graph": "`kivi`, 2 bits",
    "turbo graph": "`turbo`",
    "int8 graph": "`int8`",
    "SDPA cudnn, captured": "bf16, captured",
    "DynamicCache, flash": "DynamicCache",
}
DECODES = {"16 x 32k": {"batch": 16, "context": 32768, "room": 1}, "1 x 4k": {"batch": 1, "context": 4096, "room": 1}}
PREFILLS = {"1 x 16k": {"batch": 1, "tokens": 16384}, "16 x 1k": {"batch": 16, "tokens": 1024}}


@dataclass
class Figures:
    """What is recorded of one setting, by column; a column that is missing was not measured."""

    kl: dict[str, float] = field(default_factory=dict)  # by model
    embedded: dict[str, float] = field(default_factory=dict)  # KL and bits of `EMBEDDED`
    bits: dict[str, float] = field(default_factory=dict)  # closed blocks, and the whole cache
    speed: dict[str, float] = field(default_factory=dict)  # times the fastest attention of PyTorch


def figures(results: Path) -> dict[str, Figures]:
    """Everything recorded of every setting, by its spelling (`turbo:bits=2`)."""
    found: dict[str, Figures] = {}
    for result in load(results, EMBEDDED):
        for row in result["rows"]:
            own = found.setdefault(row["method"], Figures())
            own.embedded = {"kl": row["kl"], "bits": row["effective_bits_total"]}
    for row in (row for result in load(results, "quality-full-") for row in result["rows"] if "kl" in row):
        found.setdefault(asked(row), Figures()).kl[row["model"]] = row["kl"]
    for row in (row for result in load(results, "bits") for row in result["rows"]):
        if (row["tokens"], row["head_dim"]) == (CONTEXT, HEAD_DIM):
            own = found.setdefault(asked(row), Figures())
            own.bits = {"closed": row["effective_bits"], "all": row["effective_bits_total"]}
    for bench, points in (("decode", DECODES), ("prefill", PREFILLS)):
        for title, point in points.items():
            for name, times in _gains(results, bench, point).items():
                found.setdefault(name, Figures()).speed[f"{bench} {title}"] = times
    return found


def overview_table(results: Path) -> str:
    """The front page's rows: figures that commands of this project alone give again."""
    known = figures(results)
    columns = [f"decode {title}" for title in DECODES] + [f"prefill {title}" for title in PREFILLS]
    rows = [
        [
            f"`{name}`",
            f"{known[name].embedded['bits']:.2f}",
            f"{16 / known[name].embedded['bits']:.1f}x",
            _figure(known[name].embedded, "kl", ".5f"),
            *(_times(known[name], column) for column in columns),
        ]
        for name in FRONT
        if name in known and known[name].embedded
    ]
    header = ["method", "bits a value", "smaller by", "KL", *columns]
    return markdown(header, rows) if rows else "Not measured yet."


def settings_table(results: Path, names: Iterable[str] | None = None) -> str:
    """All that is recorded of every setting, or of `names`: fewest bits first."""
    known = figures(results)
    chosen = [name for name in (known if names is None else names) if known[name].kl or known[name].embedded]
    models = sorted({model for found in known.values() for model in found.kl})
    columns = [f"decode {title}" for title in DECODES] + [f"prefill {title}" for title in PREFILLS]
    rows = [
        [
            f"`{name}`",
            *(_figure(known[name].bits, key, ".2f") for key in ("closed", "all")),
            _figure(known[name].embedded, "kl", ".5f"),
            *(_figure(known[name].kl, model, ".5f") for model in models),
            *(_times(known[name], column) for column in columns),
        ]
        for name in sorted(chosen, key=lambda name: _size(known[name]))
    ]
    header = ["setting", "bits, closed blocks", "bits, all", "KL, embedded model", *(f"KL, {m}" for m in models)]
    return markdown([*header, *columns], rows) if rows else "Not measured yet."


def throughput_overview(results: Path) -> str:
    """Tokens a second of the rows that fit the same bytes of keys and values, at each context."""
    rows = [row for result in load(results, "speed-throughput") for row in result["rows"] if "error" not in row]
    lines = []
    for (kv_mib, context), found in by_point(rows, "kv_mib", "context").items():
        of = {row["way"]: f"{row['tokens_per_s']:,.0f} ({row['batch']})" for row in found}
        lines.append([f"{kv_mib / 1024:g} GiB", str(context), *(of.get(way, "") for way in THROUGHPUT)])
    return markdown(["keys and values", "context", *THROUGHPUT.values()], lines) if lines else "Not measured yet."


def generate_overview(results: Path) -> str:
    """Milliseconds a token of `generate`, by context and way, of the recorded single rows."""
    rows = [row for result in load(results, "speed-generate") for row in result["rows"] if row["batch"] == 1]
    times = {(row["context"], row["way"]): row.get("ms_per_token") or row.get("step_ms") for row in rows}
    lines = [
        [str(context), *(f"{times[context, way]:.1f}" if times.get((context, way)) else "" for way in WAYS)]
        for context in sorted({context for context, _ in times})
    ]
    return markdown(["context", *WAYS.values()], lines) if lines else "Not measured yet."


def _size(found: Figures) -> float:
    """Bits to sort by; what has none comes last."""
    return found.bits.get("all", found.embedded.get("bits", float("inf")))


def _figure(found: dict[str, float], key: str, form: str) -> str:
    text = format(found[key], form) if key in found else ""
    return text.removeprefix("-") if text and float(text) == 0 else text


def _times(found: Figures, column: str) -> str:
    return f"{found.speed[column]:.2f}x" if column in found.speed else ""


def _gains(results: Path, bench: str, point: dict[str, int]) -> dict[str, float]:
    """At one point, how many times faster a way is than the fastest attention of PyTorch there."""
    rows = [row for result in load(results, f"speed-{bench}") for row in result["rows"]]
    return gains(rows, *point).get(tuple(point.values()), {})
