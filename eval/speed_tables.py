"""Tables of speed: steps and prompts of one layer, costs of a setting's parts, other calls, other models, memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recorded import Result
from table import FORMATTER, Row, Rows, Table, each, every_row

from qattn_hf.bench.tables import best_stock, by_point

STOCK = "SDPA, bf16"
SHOWN = (
    "none", "int8", "sage2", "turboquant", "kivi:bits=4,group_size=128", "turbo:sink_num=0",
    "turbo:bits=mixed,sink_num=0", "kivi:bits=2,group_size=128,residual_length=32", "sinkq",
)  # fmt: skip
DECODES = [(rows, tokens) for rows in (1, 16, 64) for tokens in (512, 8192, 32768)]
# The simpler setting that each recipe or default is compared with
PARENTS = {
    "turbo": "turbo:sink_num=0",
    "turbo_rotated": "turbo",
    "int8_rotated": "int8",
    "low4": "sinkq:bits=4",
    "low3": "sinkq:bits=3",
    "low2": "sinkq",
}


@dataclass(frozen=True)
class Pick:
    """A line that compares one recorded time with another.

    Attributes:
        what: was timed.
        record: where, without its runs.
        at: keys and values of both rows.
        ours: more of our row; of several rows the fastest counts.
        theirs: more of the other row, or the figure of our row that is the other's.
        versus: what the other row is.
        figure: the time, or another figure; `form` says how it is written, `more` that more is better.
    """

    what: str
    record: str
    at: Row
    ours: Row
    theirs: Row | str
    versus: str = "stock"
    figure: str = "ms"
    form: str = "{x:.0f} ms"
    more: bool = False

    def lines(self, rows: list[Row]) -> Iterable[Row]:
        """The compared figures, unless one was not recorded."""

        def best(keys: Row, figure: str) -> list[float]:
            found = [row[figure] for row in rows if figure in row and (self.at | keys).items() <= row.items()]
            return sorted(found, reverse=self.more)[:1]

        theirs = best(self.ours, self.theirs) if isinstance(self.theirs, str) else best(self.theirs, self.figure)
        for x, y in zip(best(self.ours, self.figure), theirs, strict=False):
            shown = {"ours": FORMATTER.format(self.form, x=x), "theirs": FORMATTER.format(self.form, x=y)}
            way = self.ours.get("method") or self.ours.get("way", self.at.get("way"))
            times = {"times": x / y if self.more else y / x}
            yield {"what": self.what, "setting": way.split(" ")[0], "versus": self.versus, **shown, **times}


PAPER, GRAPHED, STEP = {"way": "turbo:sink_num=0"}, {"way": "turbo:sink_num=0 graph"}, "{x:us.1f} us"
LATENT, LAYER = {"heads": 128, "rows": 1}, {"room": 1, "batch": 16, "context": 32768}
STOCK_WAY, DYNAMIC, BITDECODING = {"way": "stock"}, {"way": "DynamicCache"}, {"way": "BitDecoding, 4 bit"}
BEAMS = {
    "4 beams, 32 new tokens": "4 beams",
    "prompt lookup, every draft accepted": "prompt lookup, all accepted",
    "prompt lookup, no draft accepted": "prompt lookup, none accepted",
    "draft model, every draft accepted": "draft model, all accepted",
}
PACKED_WINDOWS = {"way": "turbo:sliding=packed"}
CALLS = (
    Pick("step without a CUDA graph", "speed-eager", {"what": "step"}, PAPER, "stock_ms"),
    Pick("first prompt of a cache, 512 tokens", "speed-eager", {"what": "prompt", "tokens": 512}, PAPER, "stock_ms"),
    *(Pick(text, "speed-beams", {"layers": 32, "what": what}, GRAPHED, STOCK_WAY) for text, what in BEAMS.items()),
    Pick("256 requests in 4 GiB, tokens a second", "speed-requests", {}, PAPER, {"way": "model precision, sdpa"},
         "stock's pages", "tokens_per_s", "{x:.0f}", True),
    Pick("Gemma 3 4B, 24 requests in 2 GiB, tokens a second", "speed-requests-gemma-3-4b", {}, {"way": "turbo"},
         {"packed": False}, "stock's pages", "tokens_per_s", "{x:.0f}", True),
    Pick("the same of half of gpt-oss-20b, 64 requests in 512 MiB", "speed-requests-gpt-oss-20b-12-layers",
         {"batch_tokens": 512}, {"way": "turbo"}, {"packed": False}, "stock's pages", "tokens_per_s", "{x:.0f}", True),
    Pick("half of gpt-oss-20b, 64 requests in 512 MiB, tokens a second", "speed-requests-gpt-oss-20b-12-layers", {},
         PACKED_WINDOWS, {"way": "turbo"}, "windows not packed", "tokens_per_s", "{x:.0f}", True),
    *(Pick(f"{rows} prompts of {tokens} tokens, 8B", "speed-first-token", {"context": tokens}, {"way": "turbo graph"},
           DYNAMIC, figure="first_token_s", form="{x:.3f} s") for rows, tokens in ((16, 1024), (32, 512))),
    Pick("prompt of 102,400 tokens", "long-prompts", {}, {"method": "turbo:sink_num=0"}, {"method": "full"},
         figure="first_token_s", form="{x:.2f} s"),
    Pick("compiler, prompts of ten shapes", "speed-first-call", PAPER, {"cache": "warm"}, {"cache": "cold"},
         "first process", "wait_s", "{x:.1f} s"),
)  # fmt: skip
MODELS = (
    Pick("64 query heads, 8 KV heads", "speed-heads", LAYER | {"heads": 64, "head_dim": 128}, PAPER, {"packed": False},
         STOCK, form=STEP),
    Pick("16 query heads of 256 channels", "speed-heads", LAYER | {"heads": 16, "kv_heads": 8, "head_dim": 256}, PAPER,
         {"packed": False}, STOCK, form=STEP),
    Pick("latent attention, a step after 32k tokens", "speed-latent", LATENT | {"context": 32768}, {"method": "turbo"},
         {"method": "stock"}, STOCK, form="{x:.2f} ms"),
    Pick("latent attention, a prompt of 512 tokens", "speed-latent", LATENT | {"new_tokens": 512},
         {"method": "turbo", "impl": "triton"}, {"method": "stock"}, STOCK, form="{x:.2f} ms"),
    Pick("Gemma 3 4B, a token after 32k", "speed-sliding-gemma-3-4b", {"context": 32768}, GRAPHED, DYNAMIC,
         figure="ms_per_token", form="{x:.1f} ms"),
    Pick("half of gpt-oss-20b, a token after 4k", "speed-sliding-gpt-oss-20b", {"context": 4096}, GRAPHED, DYNAMIC,
         figure="ms_per_token", form="{x:.1f} ms"),
    *(Pick(f"12 layers of Gemma 4, a token after {tokens // 1024}k", "speed-sliding-gemma-4-12-layers",
           {"context": tokens}, {"way": "turbo graph"}, {"way": "StaticCache"}, "`StaticCache`, compiled",
           "ms_per_token", "{x:.1f} ms") for tokens in (4096, 32768)),
    Pick("packed window of 1,024 tokens, 16 rows of 32k", "speed-windows", {"bench": "step", "batch": 16},
         {"method": "turbo", "way": "window"}, {"way": "all tokens, masked"}, "all tokens, masked", form=STEP),
    Pick("Llama's heads, 16 x 32k", "speed-bitdecoding", LAYER, PAPER, BITDECODING, "BitDecoding, 4 bits", form=STEP),
    Pick("Llama's heads, 64 x 512", "speed-bitdecoding", {"batch": 64, "context": 512}, PAPER, BITDECODING,
         "BitDecoding, 4 bits", form=STEP),
    Pick("`sparse_v_tau=1e-6`, 16 x 8k", "speed-sparse-v", PAPER | {"batch": 16, "context": 8192}, {"tau": 1e-6},
         {"tau": 0.0}, "all values read", form=STEP),
)  # fmt: skip


def compared(*keys: str, points: Iterable[tuple] | None = None) -> Rows:
    """Rows of PyTorch's fastest attention and of the shown ways, with how many times faster these are, by point."""

    def rows(results: list[Result]) -> Iterable[Row]:
        found = by_point((row for row in every_row(results) if row.get("room", 1) == 1), *keys)
        for point in found if points is None else points:
            if best := best_stock(here := found.get(point, [])):
                title = " x ".join(map(str, point))
                yield best | {"setting": STOCK, "point": title}
                ways = {row["way"]: row for row in here if row["packed"] and "ms" in row}
                for row in (ways[way] for way in SHOWN if way in ways):
                    yield row | {"setting": f"`{row['way']}`", "point": title, "times": best["ms"] / row["ms"]}

    return rows


def _beside_peers(results: list[Result]) -> Iterable[Row]:
    """PyTorch's fastest attention, kernels of other libraries, then ours, by point."""
    for (batch, context), here in sorted(by_point(every_row(results), "batch", "context").items()):
        shown = [row for row in here if "ms" in row and (row.get("peer") or row["packed"])]
        if best := best_stock(here):
            shown.append(best | {"way": STOCK})
        for row in sorted(shown, key=lambda row: (row["packed"], bool(row.get("peer")))):  # SDPA, peers, ours
            way = row["way"]
            yield row | {"setting": f"`{way}`" if row["packed"] else way, "point": f"{batch} x {context}"}


def _ratios(row: Row) -> str:
    """The median of the ratios to the first method, with their quartiles; nothing of the first itself."""
    first = row["ratio_low"] == row["ratio_high"] == 1
    return "" if first else f" ({row['ratio']:.3f}, {row['ratio_low']:.3f} to {row['ratio_high']:.3f})"


def _longer(results: list[Result]) -> Iterable[Row]:
    """How much longer a decode step of a recipe is than its parent's."""
    for (batch, context), here in sorted(by_point(every_row(results), "batch", "context").items()):
        times = {row["way"]: row["ms"] for row in here if row["packed"] and "ms" in row}
        for recipe, parent in PARENTS.items():
            if recipe != "turbo" and {recipe, parent} <= times.keys():  # timed in turn: the table `decode-in-turn`
                longer = times[recipe] / times[parent] - 1
                yield {"recipe": recipe, "parent": parent, "point": f"{batch} x {context}", "longer": longer}


def _picked(picks: tuple[Pick, ...]) -> Rows:
    def rows(results: list[Result]) -> Iterable[Row]:
        found: dict[str, list[Row]] = {}
        for result in results:
            found.setdefault(result["name"].partition(":")[0], []).extend(result["rows"])
        return (line for pick in picks for line in pick.lines(found.get(pick.record, [])))

    return rows


def _planned(results: list[Result]) -> Iterable[Row]:
    """Yield a line for each run, with the prediction and the numbers of PyTorch's allocator."""
    for row in every_row(results):
        cache = "DynamicCache" if row["method"] == "full" else row["method"]
        for run in row["runs"]:
            sides = {"p": run["predicted"], "m": run["measured"]}
            said = {f"{key}_{name}": side[key] for name, side in sides.items() for key in ("allocated", "reserved")}
            fits = [("no", "yes")[ok] for ok in (run["predicted"]["fits"], run["measured"]["ran"])]
            yield run | said | {"cache": cache, "fits": fits[0], "ran": fits[1]}


def compares(name: str, picks: tuple[Pick, ...]) -> Table:
    return Table(
        name,
        " ".join(dict.fromkeys(pick.record for pick in picks)),
        "| what | setting | ours | compared with | its figure | times better |",
        "| {what} | `{setting}` | {ours} | {versus} | {theirs} | {times:.2f}x |",
        _picked(picks),
    )


TABLES = (
    Table("decode", "speed-decode",
          "| setting || {point} |",
          "| {setting} || {ms:us.1f}{times: (.2fx)} |",
          compared("batch", "context", points=DECODES), "point"),
    Table("decode-peers", "speed-peers",
          "| kernel || {point} |",
          "| {setting} || {ms:us.1f} |",
          _beside_peers, "point"),
    Table("prefill", "speed-prefill",
          "| setting || {point} |",
          "| {setting} || {ms:#.3g}{times: (.2fx)} |",
          compared("batch", "tokens"), "point"),
    Table("decode-in-turn", "speed-decode-in-turn",
          "| rows x tokens || `{way}`, us |",
          "| {batch} x {context} || {ms:us.2f}{ratios} |",
          each(ratios=_ratios), "way"),
    Table("recipes-speed", "speed-recipes",
          "| setting | compared with || {point} |",
          "| `{recipe}` | `{parent}` || {longer:+.1%} |",
          _longer, "point"),
    compares("calls-speed", CALLS),
    compares("models-speed", MODELS),
    Table("cpu-speed", "cpu-speed",
          "| method | tokens | prompt, stock | prompt, packed | step, stock | step, packed |",
          "| `{method}` | {tokens:,} | {prompt_stock_ms:.0f} | {prompt_packed_ms:.0f} | {step_stock_ms:.1f} "
          "| {step_packed_ms:.1f} |"),
    Table("plan-check", "plan-check",
          "| cache | tokens | of the plan | fits, predicted | fits | allocated, GiB: predicted | measured "
          "| reserved, GiB: predicted | measured |",
          "| `{cache}` | {context} | {share:.0%} | {fits} | {ran} | {allocated_p:GiB.2f} | {allocated_m:GiB.2f} "
          "| {reserved_p:GiB.2f} | {reserved_m:GiB.2f} |",
          _planned),
)  # fmt: skip
