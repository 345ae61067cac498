"""What each setting keeps, loses and gains, together out of several records: the front page, and a table of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from recorded import Result, all_listed, asked, load, markdown

from qattn_hf.bench.tables import by_point, gains
from qattn_hf.recipes.recipe_files import list_recipes

CONTEXT, HEAD_DIM = 32768, 128
# The recommended settings, most bits first. Every instrument has measured each: a test asks for that.
FRONT = (
    "none",
    "int8_rotated",
    "int8",
    "sage2",
    "turboquant",
    "low4",
    "turbo_rotated",
    "turbo",
    "low3",
    "low2",
    "sinkq",
)
RELEASED = {"released-smollm2": "SmolLM2", "released-gemma3": "Gemma 3"}  # records, as columns
# A released checkpoint may have other head dims than `HEAD_DIM`, which moves the share of scales by a quarter bit. More
# is another format, as of a family whose defaults change bits: such a figure does not belong to the row.
SAME_BITS = 0.3
WIDTHS = (9, 7, 5, 3.75, 2.75)  # most bits of a value in closed blocks, of the table of least losses
# ways of `generate` on the front page, by their headings
WAYS = {
    "turbo graph": "`turbo`",
    "turbo compile": "`turbo`, compiled",
    "turbo:sink_num=0 graph": "`turbo:sink_num=0`",
    "turbo:sink_num=0 compile": "`turbo:sink_num=0`, compiled",
    "StaticCache": "StaticCache, compiled",
    "DynamicCache": "DynamicCache",
    "floor, captured": "no attention, captured",
}
# ways of `throughput` there, likewise
THROUGHPUT = {
    "kivi:bits=2,group_size=128,residual_length=32 graph": "`kivi`, 2 bits",
    "turbo graph": "`turbo`",
    "turbo:sink_num=0 graph": "`turbo:sink_num=0`",
    "int8 graph": "`int8`",
    "SDPA cudnn, captured": "bf16, captured",
    "DynamicCache, flash": "DynamicCache",
}
DECODES = {"16 x 32k": {"batch": 16, "context": 32768, "room": 1}, "1 x 4k": {"batch": 1, "context": 4096, "room": 1}}
PREFILLS = {"1 x 16k": {"batch": 1, "tokens": 16384}, "16 x 1k": {"batch": 16, "tokens": 1024}}


@dataclass
class Figures:
    """What is recorded of one setting; a column that is missing was not measured.

    Attributes:
        released: rows of `eval/released.py`, by record. bits: of closed blocks and of the whole cache.
        speed: times the fastest attention of PyTorch, by column.
    """

    released: dict[str, Result] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)

    def belongs(self, row: Result) -> bool:
        """Whether a row of quality was measured in this setting's bits."""
        return "closed" not in self.bits or abs(row["bits"] - self.bits["closed"]) <= SAME_BITS


def figures(results: Path) -> dict[str, Figures]:
    """Everything recorded of every setting, by its spelling (`turbo:bits=2`)."""
    found: dict[str, Figures] = {}
    for row in (row for result in load(results, "bits") for row in result["rows"]):
        if (row["tokens"], row["head_dim"]) == (CONTEXT, HEAD_DIM):
            own = found.setdefault(asked(row), Figures())
            own.bits = {"closed": row["effective_bits"], "all": row["effective_bits_total"]}
    for record in RELEASED:
        for row in (row for result in load(results, record) for row in result["rows"] if "kl" in row):
            found.setdefault(row["setting"], Figures()).released[record] = row
    for bench, points in (("decode", DECODES), ("prefill", PREFILLS)):
        for title, point in points.items():
            for name, times in _gains(results, bench, point).items():
                found.setdefault(name, Figures()).speed[f"{bench} {title}"] = times
    return found


def overview_table(results: Path) -> str:
    """The front page's rows: the recommended settings."""
    known = figures(results)
    return _table(known, [name for name in FRONT if name in known])


def settings_table(results: Path, names: Iterable[str] | None = None) -> str:
    """All that is recorded of settings that methods list and of recipes, or of `names`: fewest bits first."""
    known, listed = figures(results), {*all_listed(), *list_recipes()}
    names = [name for name in (known if names is None else names) if name in listed]
    chosen = [name for name in names if known[name].released or known[name].speed]
    return _table(known, sorted(chosen, key=lambda name: _size(known[name])))


def _table(known: dict[str, Figures], names: Iterable[str]) -> str:
    speed = [f"decode {title}" for title in DECODES] + [f"prefill {title}" for title in PREFILLS]
    rows = [
        [
            f"`{name}`",
            _figure(known[name].bits, "closed", ".2f"),
            _figure(known[name].bits, "all", ".2f"),
            *(cell for record in RELEASED for cell in _quality(known[name], record)),
            *(_times(known[name], column) for column in speed),
        ]
        for name in names
    ]
    header = ["setting", "bits, closed blocks", "bits, all", *_quality_titles(), *speed]
    return markdown(header, rows) if rows else "Not measured yet."


def _quality(found: Figures, record: str) -> tuple[str, str]:
    """KL and top-1 agreement of one checkpoint; empty where its bits are not the row's."""
    row = found.released.get(record)
    return (f"{row['kl']:.4f}", f"{row['same_top1']:.3f}") if row and found.belongs(row) else ("", "")


def least_table(results: Path) -> str:
    """Of each width, the setting whose larger KL over the released checkpoints is smallest: no prose claims that. Only
    settings count that each checkpoint measured in the row's bits."""
    known, lines = figures(results), []
    for width in WIDTHS:
        worst = {
            name: max(row["kl"] for row in found.released.values())
            for name, found in known.items()
            if len(found.released) == len(RELEASED)
            and found.bits.get("closed", float("inf")) <= width
            and all(map(found.belongs, found.released.values()))
        }
        if worst:
            best = known[name := min(worst, key=lambda name: worst[name])]
            cells = [cell for record in RELEASED for cell in _quality(best, record)]
            lines.append([f"{width:g}", f"`{name}`", f"{best.bits['closed']:.2f}", *cells])
    header = ["bits at most", "least loss", "bits", *_quality_titles()]
    return markdown(header, lines) if lines else "Not measured yet."


def _quality_titles() -> list[str]:
    return [f"{what}, {model}" for model in RELEASED.values() for what in ("KL", "top-1")]


def fastest_table(results: Path) -> str:
    """Which setting of each width decodes fastest, and at how many recorded points: no prose claims that."""
    known = figures(results)
    lines = []
    for title, low, high in (("8 bits", 8, 9), ("4 bits", 4, 5), ("2 bits", 2, 2.75)):
        first: dict[str, list[str]] = {}
        points = 0
        for (batch, context, room), times in _decoded(results).items():
            of_width = {n: t for n, t in times.items() if n in known and low <= known[n].bits.get("closed", 0) < high}
            if room == 1 and len(of_width) > 1:
                points += 1
                first.setdefault(max(of_width, key=lambda name: of_width[name]), []).append(f"{batch} x {context}")
        for name, won in sorted(first.items(), key=lambda item: -len(item[1])):
            lines.append([title, f"`{name}`", f"{len(won)} of {points}", ", ".join(won)])
    return markdown(["width", "fastest decode", "points", "rows x tokens"], lines) if lines else "Not measured yet."


def _decoded(results: Path) -> dict[tuple, dict[str, float]]:
    """At each point of the record of decodes, how many times faster than PyTorch each setting is."""
    (result,) = load(results, "speed-decode") or [{"rows": []}]
    return gains(result["rows"], "batch", "context", "room")


def throughput_overview(results: Path) -> str:
    """Tokens a second of the rows that fit the same bytes of keys and values, at each context."""
    rows = [row for result in load(results, "speed-throughput") for row in result["rows"] if "error" not in row]
    shown, lines = _recorded(THROUGHPUT, rows), []
    for (kv_mib, context), found in by_point(rows, "kv_mib", "context").items():
        of = {row["way"]: f"{row['tokens_per_s']:,.0f} ({row['batch']})" for row in found}
        lines.append([f"{kv_mib / 1024:g} GiB", str(context), *(of.get(way, "") for way in shown)])
    return markdown(["keys and values", "context", *shown.values()], lines) if lines else "Not measured yet."


def generate_overview(results: Path) -> str:
    """Milliseconds a token of `generate`, by context and way, of the recorded single rows."""
    rows = [row for result in load(results, "speed-generate") for row in result["rows"] if row["batch"] == 1]
    times = {(row["context"], row["way"]): row.get("ms_per_token") or row.get("step_ms") for row in rows}
    shown = _recorded(WAYS, rows)
    lines = [
        [str(context), *(f"{times[context, way]:.1f}" if times.get((context, way)) else "" for way in shown)]
        for context in sorted({context for context, _ in times})
    ]
    return markdown(["context", *shown.values()], lines) if lines else "Not measured yet."


def _recorded(ways: dict[str, str], rows: list[Result]) -> dict[str, str]:
    """Those of the `ways` that a row was recorded of."""
    return {way: title for way, title in ways.items() if any(row["way"] == way for row in rows)}


def _size(found: Figures) -> float:
    """Bits to sort by: those of closed blocks, or those of a released checkpoint; settings without either are last."""
    measured = (row["bits"] for row in found.released.values())
    return found.bits.get("closed", next(measured, float("inf")))


def _figure(found: dict[str, float], key: str, form: str) -> str:
    return format(found[key], form) if key in found else ""


def _times(found: Figures, column: str) -> str:
    return f"{found.speed[column]:.2f}x" if column in found.speed else ""


def _gains(results: Path, bench: str, point: dict[str, int]) -> dict[str, float]:
    """At one point, how many times faster a setting is than the fastest attention of PyTorch of the same record. The
    record of the recommended settings, if there is one, counts before that of all."""
    found: dict[str, float] = {}
    for record in (f"speed-{bench}", f"front-{bench}"):
        for result in load(results, record):
            found |= gains(result["rows"], *point).get(tuple(point.values()), {})
    return found
