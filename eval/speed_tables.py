"""What the records of speed show beside `qattn bench`: growth with the context, other heads, long prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorded import load, markdown

from qattn_hf.bench.tables import best_stock, by_point, ways

Row = dict[str, Any]
GIB = 2**30
NOT_MEASURED = "Not measured yet."
COMPENSATED = ",compensate_k=true"
# What each recipe, or default, is compared with, which has fewer parts
PARENTS = {
    "turbo": "turbo:sink_num=0",
    "turbo_rotated": "turbo",
    "int8_rotated": "int8",
    "low4": "sinkq:bits=4",
    "low3": "sinkq:bits=3",
    "low2": "sinkq",
}


def slope(points: dict[int, float]) -> float:
    """Least-squares slope of milliseconds over contexts, in microseconds a thousand tokens."""
    n, mean_x, mean_y = len(points), sum(points) / len(points), sum(points.values()) / len(points)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / n
    return 1e6 * covariance / (sum((x - mean_x) ** 2 for x in points) / n)


def slopes_table(results: Path) -> str:
    """How a layer's decode step grows with the context, a thousand tokens of each row, and its share of the best
    SDPA's."""
    rows = [row for result in load(results, "speed-decode") for row in result["rows"]]
    if not rows:
        return NOT_MEASURED
    tight = [row for row in rows if row["room"] == 1]
    methods, lines = ways(tight, packed=True), []
    for (batch,), found in sorted(by_point(tight, "batch").items()):
        best = {key[0]: stock["ms"] for key, here in by_point(found, "context").items() if (stock := best_stock(here))}
        per = {name: slope({row["context"]: row["ms"] for row in found if row["way"] == name}) for name in methods}
        span = f"{min(best)} to {max(best)}"
        cells = [f"{per[name]:.2f} ({per[name] / slope(best):.2f})" for name in methods]
        lines.append([str(batch), span, f"{slope(best):.2f}", *cells])
    return markdown(["B", "contexts", "best SDPA, us", *(f"{name}, us" for name in methods)], lines)


def heads_table(results: Path) -> str:
    """Speed-up of a decode step over the best SDPA by the heads of the layer."""
    found = load(results, "speed-heads")
    rows = [
        {**row, "gpu": result["device"].split()[1]} for result in found for row in result["rows"] if row["room"] == 1
    ]
    if not rows:
        return NOT_MEASURED
    methods, lines = ways(rows, packed=True), []
    for (query, kv, dim, gpu, batch, context), here in by_point(
        rows, "heads", "kv_heads", "head_dim", "gpu", "batch", "context"
    ).items():
        stock = best_stock(here)
        if stock is not None:
            times = {row["way"]: row["ms"] for row in here if row["packed"] and "ms" in row}
            cells = [f"{stock['ms'] / times[name]:.2f}x" if name in times else "" for name in methods]
            lines.append([f"{query}, {kv}, {dim}", gpu, f"{batch} x {context}", f"{stock['ms']:.4f}", *cells])
    return markdown(["query heads, KV heads, head dim", "GPU", "B x context", "best SDPA, ms", *methods], lines)


def warps_table(results: Path) -> str:
    """Milliseconds of a decode step by the warps of a program, each method's beside one another."""
    rows = [row for result in load(results, "speed-warps") for row in result["rows"]]
    packed = [row for row in rows if row["warps"] is not None]
    counts, lines = sorted({row["warps"] for row in packed}), []
    for (query, kv, dim, way, batch, context), here in sorted(
        by_point(packed, "heads", "kv_heads", "head_dim", "way", "batch", "context").items()
    ):
        times = {row["warps"]: f"{row['ms']:.4f}" for row in here if "ms" in row}
        cells = [times.get(count, "") for count in counts]
        lines.append([f"{query}, {kv}, {dim}", f"`{way}`", f"{batch} x {context}", *cells])
    header = ["query heads, KV heads, head dim", "method", "B x context", *(f"warps: {count}, ms" for count in counts)]
    return markdown(header, lines) if lines else NOT_MEASURED


def before_after_table(results: Path, record: str) -> str:
    """Milliseconds of a decode step or a prompt before and after a change, of a record of `compare_trees.py`."""
    rows = [row for result in load(results, record) for row in result["rows"]]
    rows = [row | {"context": row.get("context", row.get("tokens"))} for row in rows]
    points = sorted({(row["batch"], row["context"]) for row in rows})
    lines = []
    for (way,), here in by_point(rows, "way").items():
        first = [row for row in here if row["pass"] < 2]  # not the other tree's first method once more
        times = {(row["tree"], (row["batch"], row["context"])): row["ms"] for row in first}
        cells = [f"{times['before', point]:.4f}, {times['after', point]:.4f}" for point in points]
        lines.append([f"`{way}`", *cells])
    header = ["ms before, after", *(f"{batch} x {context}" for batch, context in points)]
    return markdown(header, lines) if lines else NOT_MEASURED


def stop_check_table(results: Path) -> str:
    """Milliseconds of a token of `generate`, and of its step alone, before stop checks were deferred and since."""
    rows = [row for result in load(results, "speed-stop-check") for row in result["rows"]]
    times = {(row["tree"], row["context"], row["way"]): row for row in rows}
    lines = []
    for (tree, context, way), row in times.items():
        if tree == "after" and row["packed"]:
            before = times["before", context, way]
            figures = (before["ms_per_token"], row["ms_per_token"], before["step_ms"], row["step_ms"])
            lines.append([way, str(context), *(f"{figure:.2f}" for figure in figures)])
    header = ["way", "context", "ms a token, before", "ms a token", "step alone, before", "step alone"]
    return markdown(header, lines) if lines else NOT_MEASURED


def recipes_speed_table(results: Path) -> str:
    """How much longer a decode step of a recipe is than its parent's, a column for each number of rows and tokens."""
    rows = [row for result in load(results, "speed-recipes") for row in result["rows"] if row["packed"]]
    times = {key: here[0]["ms"] for key, here in by_point(rows, "way", "batch", "context").items()}
    points = sorted({key[1:] for key in times})
    lines = [
        [f"`{recipe}`", f"`{parent}`", *(_longer(times, recipe, parent, point) for point in points)]
        for recipe, parent in PARENTS.items()
    ]
    header = ["setting", "compared with", *(f"{batch} x {context}" for batch, context in points)]
    return markdown(header, lines) if points else NOT_MEASURED


def _longer(times: dict[tuple, float], recipe: str, parent: str, point: tuple) -> str:
    ours, theirs = (times.get((name, *point)) for name in (recipe, parent))
    return f"{ours / theirs - 1:+.1%}" if ours and theirs else ""


def eager_table(results: Path) -> str:
    """Milliseconds of calls that are not captured, stock's and ours, the median and quartiles of their ratio, and the
    same before caches were made with less work."""

    def ratios(record: str) -> dict[tuple, tuple[Row, str]]:
        return {
            (row["way"], row["what"], row["tokens"]): (
                row,
                f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            )
            for result in load(results, record)
            for row in result["rows"]
        }

    before, lines = ratios("speed-before-eager"), []
    for key, (row, ratio) in ratios("speed-eager").items():
        call = f"prompt, {row['tokens']} tokens" if row["what"] == "prompt" else f"step behind {row['tokens']}"
        old = before[key][1] if key in before else ""
        lines.append([f"`{row['way']}`", call, f"{row['stock_ms']:.1f}", f"{row['ms']:.1f}", ratio, old])
    header = ["method", "call", "stock, ms", "ours, ms", "ratio (quartiles)", "before"]
    return markdown(header, lines) if lines else NOT_MEASURED


def compensation_speed_table(results: Path) -> str:
    """What compensation of errors of keys adds to a decode step and to a prompt of a layer: with one channel after
    another, as in the other checkout, and with eight at once."""
    rows = [row for result in load(results, "speed-compensation") for row in result["rows"]]
    rows = [row | {"length": row.get("context", row.get("tokens"))} for row in rows]
    times = {key: here[0]["ms"] for key, here in by_point(rows, "way", "tree", "bench", "batch", "length").items()}
    lines = []
    for (way, tree, bench, batch, length), ms in times.items():
        without = way.removesuffix(COMPENSATED)
        if without != way and tree == "after":
            alone = times[without, "after", bench, batch, length]
            both = (times[way, "before", bench, batch, length], ms)
            longer = [f"{x:.4f} ({x / alone - 1:+.1%})" for x in both]
            lines.append([f"`{without}`", bench, f"{batch} x {length}", f"{alone:.4f}", *longer])
    header = ["method", "what", "B x tokens", "ms", "one after another, ms", "eight at once, ms"]
    return markdown(header, lines) if lines else NOT_MEASURED


def beams_table(results: Path, record: str = "speed-beams") -> str:
    """Milliseconds of answers by beam search and assisted generation, and how many times faster than stock that is."""
    rows = [row for result in load(results, record) for row in result["rows"]]
    names, lines = list(dict.fromkeys(row["way"] for row in rows)), []
    for (layers, what), here in by_point(rows, "layers", "what").items():
        times = {row["way"]: row["ms"] for row in here}
        shown = {
            way: f"{ms:.0f}" + ("" if way == "stock" else f" ({times['stock'] / ms:.2f}x)") for way, ms in times.items()
        }
        calls = " ".join(sorted({str(row["calls"]) for row in here}))
        lines.append([str(layers), what, calls, *(shown.get(name, "") for name in names)])
    return markdown(["layers", "answer", "calls", *(f"{name}, ms" for name in names)], lines) if rows else NOT_MEASURED


def append_table(results: Path) -> str:
    """Milliseconds of a decode step by the programs that append a token."""
    rows = [row for result in load(results, "speed-append") for row in result["rows"]]
    kinds, lines = list(dict.fromkeys(row["append"] for row in rows)), []
    for (way, batch, context), here in by_point(rows, "way", "batch", "context").items():
        times = {row["append"]: f"{row['ms']:.4f}" for row in here}
        lines.append([f"`{way}`", f"{batch} x {context}", *(times.get(kind, "") for kind in kinds)])
    return markdown(["method", "B x context", *kinds], lines) if lines else NOT_MEASURED


def long_prompts_table(results: Path) -> str:
    """Seconds to the first token and the prompt's peak of memory, by the tokens of a call."""
    rows = [row for result in load(results, "long-prompts") for row in result["rows"]]
    lines = [
        [
            "`DynamicCache`" if row["method"] == "full" else f"`{row['method']}`",
            str(row["tokens"]),
            str(row["prefill_chunk_size"]),
            f"{row['first_token_s']:.2f}",
            f"{row['kv_bytes'] / GIB:.2f}",
            f"{row['peak_over_weights_and_cache'] / GIB:.2f}",
        ]
        for row in rows
    ]
    header = ["cache", "tokens", "tokens of a call", "first token, s", "KV, GiB", "peak over weights and KV, GiB"]
    return markdown(header, lines) if rows else NOT_MEASURED


def sparse_v_table(results: Path) -> str:
    """Time of a layer's decode step with sparse V on a model's own attention, over that of reading every value."""
    rows = [row for result in load(results, "speed-sparse-v") for row in result["rows"]]
    dense = {(row["way"], row["context"]): row["ms"] for row in rows if not row["tau"]}
    lines = [
        [
            f"`{row['way']}`",
            f"{row['batch']} x {row['context']}",
            f"{row['tau']:g}",
            f"{row['skip_rate']:.1%}",
            f"{row['kl']:.1e}",
            f"{row['ms']:.4f} ({row['ms'] / dense[row['way'], row['context']] - 1:+.0%})",
        ]
        for row in rows
        if row["tau"]
    ]
    header = ["method", "B x context", "`sparse_v_tau`", "values skipped", "KL to reading all", "ms (change)"]
    return markdown(header, lines) if rows else NOT_MEASURED


def plan_table(results: Path) -> str:
    """What `qattn plan` predicts of `generate` and what PyTorch's allocator then says, at shares of the planned
    context."""
    rows = [row for result in load(results, "plan-check") for row in result["rows"]]
    lines = []
    for row in rows:
        for run in row["runs"]:
            predicted, measured = run["predicted"], run["measured"]
            sides = [f"{side[key] / GIB:.2f}" for key in ("allocated", "reserved") for side in (predicted, measured)]
            said = ["fits" if fits else "does not fit" for fits in (predicted["fits"], measured["ran"])]
            name = "`DynamicCache`" if row["method"] == "full" else f"`{row['method']}`"
            lines.append([name, str(run["context"]), f"{run['share']:.0%}", *said, *sides])
    header = ["cache", "tokens", "of the plan", "predicted", "ran", "allocated, GiB: predicted", "measured"]
    return markdown([*header, "reserved, GiB: predicted", "measured"], lines) if lines else NOT_MEASURED


def windows_table(results: Path) -> str:
    """A layer's decode step with a packed sliding window, beside the same layer without one."""
    rows = [row for result in load(results, "speed-windows") for row in result["rows"] if row["bench"] != "bytes"]
    moved = {row["batch"]: row for row in rows if row["bench"] == "move"}
    lines = []
    for (batch,), found in by_point([row for row in rows if row["bench"] == "step"], "batch").items():
        of = {row["way"]: f"{1e3 * row['ms']:.1f}" for row in found}
        move = moved[batch]
        moving = f"{1e3 * move['ms']:.0f} every {move['every_tokens']} tokens"
        shape = f"{found[0]['context']}, {found[0]['window']}"
        lines.append([str(batch), shape, of["window"], of["as many tokens"], of["all tokens, masked"], moving])
    header = ["B", "context, window", "window, us", "no window, as many tokens, us", "all tokens, masked, us"]
    return markdown([*header, "moving blocks, us"], lines) if lines else NOT_MEASURED
