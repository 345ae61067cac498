"""Code that the papers' tables share: texts read with named methods, made layers with attention sinks, tasks, printing.

A table is a module of this folder with three names: `ABOUT`; `measure(run)`, which yields rows made by `row`; and
`broken(rows)`, which returns the required claims that do not hold. An optional `CLAIMS` lists claims of the paper that
our rows may contradict, which is printed and is no failure. `eval/paper.py` runs a table.

Claims about a text are mostly checked on `attention_l1`, the error of each layer's attention alone, because the KL of a
short text depends on few tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qattn_hf.attention.observe import Call, observed
from qattn_hf.cache.reporting import report
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import ShadowCaches
from qattn_hf.fidelity.inspection import inspect
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_hf.model.loading import short_name
from qattn_hf.patching import warm
from qattn_hf.patching.patcher import patch, unpatch
from qattn_hf.reading.chunks import CHUNK
from qattn_hf.reading.metrics import AttentionSums, Tokens, over_layers, text_figures, token_figures
from qattn_hf.reading.texts import Reading, full_logits
from qattn_hf.recipes.recipe import find_recipes
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.layer.scores import Scores

Row = dict[str, Any]
Baseline = Callable[[Call], torch.Tensor]  # the attention output `[B, T, Hq, D]` that a baseline gives
Way = str | Baseline  # a method with its settings, as `qattn compare` takes it, or a baseline
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries `[1, Hq, S, D]`, keys and values `[1, H, S, D]`
KEPT = ("kl", "same_top1", "rms_change", "ppl", "ppl_change_pct")
HELD = ("effective_bits", "skip_rate", "dropped_mass")
SINKS = "sinkq:sink_skip_layers=0"
MASS = 0.25  # of the attention that tokens of the smallest keys get: less is no sink


@dataclass(frozen=True)
class About:
    """Description of a table.

    Attributes:
        title: paper and number.
        model: hub name of the paper's first model; "" for tables without a model.
        tasks: lm-eval's tasks, or ours, for the paper's figures.
        missing: what cannot be reproduced here, and why.
    """

    title: str
    model: str
    missing: str
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A claim of a paper that our rows may contradict.

    Attributes:
        says: the claim, with its place in the paper.
        against: returns a line for each contradiction in a table's rows.
        why: the likely reason of a contradiction.
    """

    says: str
    against: Callable[[list[Row]], list[str]]
    why: str


@dataclass
class Run:
    """A model, its texts, and the requested tasks with lm-eval's options."""

    name: str
    model: Any
    tokenizer: Any
    reading: Reading
    tasks: list[str] = field(default_factory=list)
    limit: int | None = None
    data_dir: Path | None = None
    source: str = ""


def row(source: str, setting: str, paper: Mapping[str, Any], ours: Mapping[str, Any]) -> Row:
    """Make one row: `source` is the model or made layer, `paper` the printed figures, `ours` the measured ones."""
    return {
        "source": source,
        "setting": setting,
        "paper": dict(paper),
        "ours": {k: rounded(v) for k, v in ours.items()},
    }


def rounded(x: Any) -> Any:
    return float(f"{x:.4g}") if isinstance(x, float) else x


def through(run: Run, ways: Mapping[str, Way]) -> dict[str, Row]:
    """The text read by each way, through the packed cache where it packs: KL, same top-1, perplexity, `attention_l1`.

    Raises:
        QAttnError: if a method packed nothing.
    """
    tokens: dict[str, list[Tokens]] = {name: [] for name in ways}
    held: dict[str, Row] = {}
    recipes = {name: find_recipes([way])[way] for name, way in ways.items() if isinstance(way, str)}
    warm.begin_for(run.model, recipes.values(), run.reading.calls())
    packed = ShadowCaches(run.model, recipes, run.reading.first)
    others = dict[str, list[AttentionSums]]()

    def observe(call: Call) -> None:
        packed(call)
        skip = max(0, run.reading.first - (call.keys.shape[2] - call.query.shape[2]))
        for name, way in ways.items():
            if isinstance(way, str):
                continue
            out = way(call)  # in an unscored call as well, which may be the prompt that a baseline keeps
            if skip < call.query.shape[2]:
                layers = others.setdefault(name, [])
                if call.layer == len(layers):
                    layers.append(AttentionSums())
                layers[call.layer].add(call.out[:, skip:], out[:, skip:])

    for ids in run.reading.groups():
        packed.renew()
        with observed(run.model, observe):
            full = torch.cat(full_logits(run.model, ids, run.reading), 1)[:, :-1]
        right = ids[:, run.reading.first + 1 :].to(full.device)
        for name, way in ways.items():
            found, held[name] = logits(run, way, ids)
            tokens[name].append({k: x.cpu() for k, x in token_figures(full, found[:, :-1], right).items()})
    figures = {name: text_figures({k: torch.cat([t[k] for t in of]) for k in of[0]}) for name, of in tokens.items()}
    sums = {name: list(of.values()) for name, of in packed.sums.items()} | others
    errors = {name: over_layers([layer.figures() for layer in sums[name]])["average"]["relative_l1"] for name in ways}
    return {name: {"attention_l1": errors[name], **{k: figures[name][k] for k in KEPT}, **held[name]} for name in ways}


def logits(run: Run, way: Way, ids: torch.Tensor) -> tuple[torch.Tensor, Row]:
    """Of the scored tokens, and what the cache held at the end."""
    if not isinstance(way, str):
        with observed(run.model, way):
            return torch.cat(full_logits(run.model, ids, run.reading), 1), {}
    patch(run.model, recipe=find_recipes([way])[way])
    try:
        found = torch.cat(full_logits(run.model, ids, run.reading), 1)
        held = report(run.model).to_dict()
    finally:
        unpatch(run.model)
    if not held["packed_tokens"]:
        raise QAttnError(f"{way} packed nothing of {ids.shape[1]} tokens: read longer rows, --tokens")
    return found, {key: held[key] for key in HELD if held[key] is not None}


def scores(run: Run, ways: Mapping[str, Way | None]) -> Iterator[tuple[str, Row]]:
    """Yield lm-eval's scores of each way by name: task, metric, value, stderr, n. A way of None is full precision."""
    if not run.tasks:
        return
    from qattn_hf.lm_eval.run import rows

    def ask(name: str, recipe: Any, batch: int) -> Iterator[tuple[str, Row]]:
        about, options = {"pretrained": run.source}, {"limit": run.limit}
        settings = {"batch_size": batch}
        for found in rows(run.model, run.tokenizer, {name: recipe}, run.tasks, run.data_dir, about, settings, options):
            yield name, {key: found[key] for key in ("task", "metric", "filter", "value", "stderr", "n")}
        if recipe is not None:
            unpatch(run.model)

    for name, way in ways.items():
        if callable(way):  # reads rows without padding only
            with observed(run.model, way):
                yield from ask(name, None, 1)
        else:
            yield from ask(name, None if way is None else find_recipes([way])[way], 8)


def has_sinks(run: Run) -> bool:
    """Whether the tokens of the smallest keys get a good part of the attention, in the mean of heads and layers."""
    recipe = find_recipes([SINKS])[SINKS]
    layers = inspect(run.model, recipe, run.reading.ids[:1])
    mass = [layer.mass[head, held].sum() for layer in layers for head, held in enumerate(layer.held)]
    return bool(torch.stack(mass).mean() > MASS)


def first_row(run: Run) -> list[Layer]:
    """Return queries `[Hq, S, D]`, keys and values `[H, S, D]` of each layer that reads the first row, in fp32."""
    found: list[Layer] = []

    def keep(call: Call) -> None:
        found.append((call.query[0].float().cpu(), call.keys[0].float().cpu(), call.values[0].float().cpu()))

    with observed(run.model, keep), torch.inference_mode():
        run.model(run.reading.ids[:1].to(run.model.device), use_cache=False)
    return found


def made_layer(
    tokens: int = 512, sinks: tuple[int, ...] = (0, 170), heads: int = 4, dim: int = 64, seed: int = 0
) -> Layer:
    """A layer as SinkQ's Fig. 1 shows it: channels of large keys, and tokens of small keys that get much attention."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, dim, generator=g) for _ in range(3))
    large = torch.rand(1, heads, 1, dim, generator=g).topk(4).indices
    k.scatter_add_(-1, large.expand(-1, -1, tokens, -1), torch.full((1, heads, tokens, 4), 6.0))
    q.scatter_add_(-1, large.expand(-1, -1, tokens, -1), torch.full((1, heads, tokens, 4), -2.0))
    k[:, :, list(sinks)] = torch.randn(1, heads, len(sinks), dim, generator=g) / 4
    v[:, :, list(sinks)] /= 10
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@torch.inference_mode()
def layer_error(method: str, layer: Layer, chunk: int = CHUNK, **others: Any) -> dict[str, float]:
    """Return cosine, relative L1 and RMSE of a packed layer's outputs, without the first third of the prompt.

    `others` are settings that a method's text cannot express.
    """
    name, settings = split_method(method)
    q, k, v = layer
    packed = QAttnLayer(get_method(name)(**settings, **others).last_layer_spec(k.shape[1]))
    sums, want = AttentionSums(), exact(q, k, v)
    for start in range(0, q.shape[2], chunk):
        part = slice(start, min(start + chunk, q.shape[2]))
        handle, _ = packed.update(k[:, :, part], v[:, :, part])
        span = torch.tensor([[0, part.stop - start]], dtype=torch.int32)
        out, _ = packed.attend(q[:, :, part], handle, span, Scores(q.shape[-1] ** -0.5))
        if start >= q.shape[2] // 3:
            sums.add(want[:, :, part], out)
    return sums.figures()


def not_below(found: Mapping[str, float], orders: Iterable[tuple[str, str]], what: str) -> list[str]:
    """Return the pairs `(less, more)` that do not hold, one line each."""
    return [
        f"{what}: {less} ({found[less]:.4g}) is not below {more} ({found[more]:.4g})"
        for less, more in orders
        if not found[less] < found[more]
    ]


def in_order(*figures: str, orders: Iterable[tuple[str, str]]) -> Callable[[list[Row]], list[str]]:
    """For `Claim.against`: `not_below` of each source that has these settings, by one figure after another."""
    pairs = list(orders)

    def against(rows: list[Row]) -> list[str]:
        wrong = []
        for source in sources(rows):
            for figure in figures:
                found = column(rows, source, figure)
                wrong += not_below(found, [pair for pair in pairs if set(pair) <= found.keys()], f"{source}, {figure}")
        return wrong

    return against


def column(rows: list[Row], source: str, figure: str) -> dict[str, float]:
    """One figure of ours by setting, of one source."""
    return {row["setting"]: row["ours"][figure] for row in rows if row["source"] == source and figure in row["ours"]}


def sources(rows: list[Row], *but: str) -> list[str]:
    return [source for source in dict.fromkeys(row["source"] for row in rows) if source not in but]


def text_rows(run: Run, ways: Mapping[str, Way | None], paper: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row per way for the text, then one per way, task and metric. Full precision (None) has only tasks."""
    source = short_name(run.name)
    for name, found in through(run, {name: way for name, way in ways.items() if way is not None}).items():
        yield row(source, name, paper.get(name, {}), found)
    for name, found in scores(run, ways):
        yield row(f"{source}, {found['task']}", name, paper.get(name, {}), found)


def shown(rows: list[Row]) -> str:
    """Return the paper's figures next to ours, as Markdown."""

    def words(figures: Mapping[str, Any]) -> str:
        return ", ".join(f"{key} {value}" for key, value in figures.items() if value is not None)

    lines = [[r["source"], r["setting"], words(r["paper"]), words(r["ours"])] for r in rows]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [["source", "setting", "paper", "ours"], ["---"] * 4, *lines]
    )


def contradicted(table: Any, rows: list[Row]) -> list[tuple[Claim, list[str]]]:
    """The claims of a table's module that its rows contradict, and how."""
    return [(claim, wrong) for claim in getattr(table, "CLAIMS", ()) if (wrong := claim.against(rows))]


def finish(table: Any, rows: Iterable[Row]) -> list[str]:
    """Print rows as they arrive, the table, missing parts and contradictions. Return the required claims that fail."""
    found, about = [], table.ABOUT
    for one in rows:
        found.append(one)
        print(json.dumps({"table": about.title, **one}), flush=True)
    print(f"\n{about.title}\n\n{shown(found)}\n\nNot reproduced: {about.missing}")
    for claim, wrong in contradicted(table, found):
        print("\n".join([f"\nThe paper: {claim.says}. Not here:", *wrong, f"Likely because {claim.why}."]))
    return table.broken(found)
