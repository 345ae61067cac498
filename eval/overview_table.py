"""Bits, loss and speed of each setting, joined from several records, for the front page and tables of all settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from recorded import Result, all_listed, asked
from table import Row, Rows, Table, every_row

from qattn_hf.bench.tables import gains
from qattn_hf.recipes.recipe_files import list_recipes

CONTEXT, HEAD_DIM = 32768, 128
# The recommended settings, most bits first. Every instrument has measured each: a test asks for that.
FRONT = (
    "none", "int8_rotated", "int8", "sage2", "turboquant", "low4", "turbo_rotated", "turbo", "low3", "low2", "sinkq",
)  # fmt: skip
RELEASED = {"released-smollm2": "SmolLM2", "released-gemma3": "Gemma 3"}  # records, as columns
# A released checkpoint may have other head dims than `HEAD_DIM`, which moves the share of scales by a quarter bit. More
# is another format, as of a family whose defaults change bits: such a figure does not belong to the row.
SAME_BITS = 0.3
WIDTHS = (9, 7, 5, 3.75, 2.75)  # most bits of a value in closed blocks, of the table of least losses
FASTEST = (("8 bits", 8, 9), ("4 bits", 4, 5), ("2 bits", 2, 2.75))  # widths of the table of fastest decodes
# ways of `generate` on the front page, by their headings
WAYS = {
    "turbo graph": "`turbo`",
    "turbo fused": "`turbo`, long answers",
    "StaticCache": "StaticCache, compiled",
    "DynamicCache": "DynamicCache",
    "floor, captured": "no attention, captured",
}
# ways of `throughput` on the front page, by their headings
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
SPEED = {f"{bench} {title}": point for bench, points in (("decode", DECODES), ("prefill", PREFILLS))
         for title, point in points.items()}  # fmt: skip
# The speed record of the recommended settings takes precedence over the record of all settings.
RECORDS = "bits* released-smollm2* released-gemma3* speed-decode front-decode* speed-prefill front-prefill"
LOSS = " | ".join(f"KL, {model} | top-1, {model}" for model in RELEASED.values())
LOSSES = " | ".join(f"{{kl {model}:.4f}} | {{top-1 {model}:.3f}}" for model in RELEASED.values())
HEAD = f"| setting | bits, closed blocks | bits, all | {LOSS} | {' | '.join(SPEED)} |"
TIMES = " | ".join(f"{{{title}:.2f}}x" for title in SPEED)
LINE = f"| `{{setting}}` | {{closed:.2f}} | {{all:.2f}} | {LOSSES} | {TIMES} |"


def figures(results: list[Result]) -> dict[str, Row]:
    """Everything recorded of every setting, by its spelling (`turbo:bits=2`), as far as it was measured.

    `closed` and `all` are bits, of closed blocks and of the whole cache; `measured` are bits of a released checkpoint.
    """
    known: dict[str, Row] = {}
    for result in results:
        name, rows = result["name"], result["rows"]
        if name.startswith("bits"):
            for row in (row for row in rows if (row["tokens"], row["head_dim"]) == (CONTEXT, HEAD_DIM)):
                of = known.setdefault(asked(row), {"setting": asked(row)})
                of |= {"closed": row["effective_bits"], "all": row["effective_bits_total"]}
        elif name.startswith("released"):
            model = next(model for record, model in RELEASED.items() if name.startswith(record))
            for row in (row for row in rows if "kl" in row):
                of = known.setdefault(row["setting"], {"setting": row["setting"]})
                of.setdefault("measured", row["bits"])
                same = abs(row["bits"] - of.get("closed", row["bits"])) <= SAME_BITS
                of |= {
                    f"{key} {model}": row[at] if same else None for key, at in (("kl", "kl"), ("top-1", "same_top1"))
                }
        else:
            for title, point in SPEED.items():
                if title.split()[0] in name:
                    for setting, times in gains(rows, *point).get(tuple(point.values()), {}).items():
                        known.setdefault(setting, {"setting": setting})[title] = times
    return known


def settings_of(chosen: Callable[[str], bool]) -> Rows:
    """Rows of the settings that methods list and of recipes, with a figure of loss or speed: fewest bits first."""

    def rows(results: list[Result]) -> Iterable[Row]:
        listed = {*all_listed(), *list_recipes()}
        known = [row for name, row in figures(results).items() if name in listed and chosen(name)]
        shown = [row for row in known if "measured" in row or any(title in row for title in SPEED)]
        return sorted(shown, key=lambda row: row.get("closed", row.get("measured", float("inf"))))

    return rows


def _front(results: list[Result]) -> Iterable[Row]:
    known = figures(results)
    return (known[name] for name in FRONT if name in known)


def _least(results: list[Result]) -> Iterable[Row]:
    """The setting of each width whose larger KL over the released checkpoints is smallest.

    A setting counts only if each checkpoint measured it in the row's bits."""
    losses = [f"kl {name}" for name in RELEASED.values()]
    known = [row for row in figures(results).values() if all(row.get(key) is not None for key in losses)]
    for width in WIDTHS:
        if narrow := [row for row in known if row.get("closed", float("inf")) <= width]:
            yield min(narrow, key=lambda row: max(row[key] for key in losses)) | {"width": width}


def _fastest(results: list[Result]) -> Iterable[Row]:
    """The settings of each width that decode fastest at some recorded point, with these points and their number."""
    closed = {name: row.get("closed", 0) for name, row in figures(results).items()}
    decoded = gains(every_row([r for r in results if r["name"] == "speed-decode"]), "batch", "context", "room")
    for title, low, high in FASTEST:
        won: dict[str, list[str]] = {}
        for (batch, context, room), times in sorted(decoded.items()):
            of_width = {name: x for name, x in times.items() if low <= closed.get(name, 0) < high}
            if room == 1 and len(of_width) > 1:
                won.setdefault(max(of_width, key=lambda name: of_width[name]), []).append(f"{batch} x {context}")
        points = sum(map(len, won.values()))
        for name, at in sorted(won.items(), key=lambda item: -len(item[1])):
            yield {"width": title, "setting": name, "won": len(at), "points": points, "at": ", ".join(at)}


def _by_way(ways: dict[str, str]) -> Rows:
    """Rows of some ways, with their headings, fewest tokens first; of `generate` single rows alone."""

    def rows(results: list[Result]) -> Iterable[Row]:
        found = [row for row in every_row(results) if "error" not in row and row["way"] in ways]
        for row in sorted(found, key=lambda row: (row.get("kv_mib", 0), row["context"])):
            if row["bench"] != "generate" or row["batch"] == 1:
                made = {"title": ways[row["way"]], "gib": row.get("kv_mib", 0) / 1024}
                yield row | made | {"token": row.get("ms_per_token") or row.get("step_ms")}

    return rows


def settings_table(results: Path, chosen: Callable[[str], bool]) -> str:
    """All that is recorded of the chosen settings."""
    return Table("settings", RECORDS, HEAD, LINE, settings_of(chosen))(results)


TABLES = (
    Table("overview", RECORDS, HEAD, LINE, _front),
    Table("settings", RECORDS, HEAD, LINE, settings_of(lambda name: True)),
    Table("least", RECORDS,
          f"| bits at most | least loss | bits | {LOSS} |",
          f"| {{width:g}} | `{{setting}}` | {{closed:.2f}} | {LOSSES} |",
          _least),
    Table("fastest", RECORDS,
          "| width | fastest decode | points | rows x tokens |",
          "| {width} | `{setting}` | {won} of {points} | {at} |",
          _fastest),
    Table("overview-generate", "speed-generate",
          "| context || {title} |",
          "| {context} || {token:.1f} |",
          _by_way(WAYS), "way", tuple(WAYS)),
    Table("overview-throughput", "speed-throughput",
          "| keys and values | context || {title} |",
          "| {gib:g} GiB | {context} || {tokens_per_s:,.0f} ({batch}) |",
          _by_way(THROUGHPUT), "way", tuple(THROUGHPUT)),
)  # fmt: skip
