"""TurboAttention, Fig. 4, 8, 9 and 10: outlier channels of queries, keys and values, and values quantized by channel.

Each layer has three results:

- the largest range of a channel divided by the median range, for queries, keys and values (Fig. 4);
- the same ratio for gaps of values, by channel and by token (Figs 8, 9);
- the relative error of 4-bit values with a step per channel over 64 tokens, or per token over 64 channels (Fig. 10).

Channels of made values have different sizes, as in Phi-3.

Fails if, averaged over the model's layers, outliers of queries and keys are not larger than those of values, or if made
values are not better by channel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from baselines.gear import by_channel, by_token
from papers.common import About, Row, Run, column, not_below, row, sources

from qattn_hf.attention.observe import Call, observed
from qattn_hf.fidelity.inspection import inspect
from qattn_hf.model.loading import short_name
from qattn_hf.recipes.recipe import find_recipe

ABOUT = About(
    title="TurboAttention, Fig. 4, 8, 9 and 10",
    model="microsoft/Phi-3-mini-4k-instruct",
    missing="the figures are plots without numbers; `qattn inspect MODEL --text FILE --pictures FOLDER` draws them. "
    "Whether values are better by channel depends on the model, as the paper says, so only made values are checked.",
)
MADE, MEAN, BITS, GROUP = "made values", "mean of layers", 4, 64


def outlier(ranges: torch.Tensor) -> float:
    """The largest of the last dim by the median, mean over heads."""
    return (ranges.amax(-1) / ranges.median(-1).values.clamp(min=1e-6)).mean().item()


def error(x: torch.Tensor) -> dict[str, float]:
    """Of values `[H, S, D]`, whole groups of tokens."""
    x = x[:, : x.shape[1] // GROUP * GROUP].float()
    ways = {"by channel": by_channel(x, BITS, GROUP), "by token": by_token(x, BITS, GROUP)}
    return {name: ((got - x).abs().sum() / x.abs().sum()).item() for name, got in ways.items()}


def made() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    sizes = torch.ones(64)
    sizes[:4] = torch.tensor([4.0, 6.0, 8.0, 10.0])
    return torch.randn(4, 512, 64, generator=g) * sizes


def values(run: Run) -> list[torch.Tensor]:
    """Of each layer, `[H, S, D]`, of the first row."""
    found: dict[int, torch.Tensor] = {}

    def keep(call: Call) -> None:
        found[call.layer] = call.values[0].cpu()

    with observed(run.model, keep), torch.inference_mode():
        run.model(run.reading.ids[:1].to(run.model.device), use_cache=True)
    return [found[i] for i in sorted(found)]


def measure(run: Run) -> Iterator[Row]:
    yield row(MADE, "values in 4 bits", {}, error(made()))
    layers = []
    seen = inspect(run.model, find_recipe("turbo_paper", None, {}), run.reading.ids[:1])
    for looked, own in zip(seen, values(run), strict=True):
        ours = {name: outlier(high - low) for name, (low, high) in looked.ranges.items()}
        gaps = {"channel gaps": looked.channel_gaps["value"], "token gaps": looked.token_gaps["value"]}
        layers.append({**ours, **{name: outlier(gap) for name, gap in gaps.items()}, **error(own)})
        yield row(short_name(run.name), f"layer {len(layers) - 1}", {}, layers[-1])
    mean = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
    yield row(f"{short_name(run.name)}, all", MEAN, {}, mean)


def broken(rows: list[Row]) -> list[str]:
    made_error = next(r["ours"] for r in rows if r["source"] == MADE)
    wrong = not_below(made_error, [("by channel", "by token")], MADE)
    for source in sources(rows, MADE):
        if MEAN in column(rows, source, "value"):
            mean = next(r["ours"] for r in rows if r["source"] == source)
            wrong += not_below(mean, [("value", "key"), ("value", "query")], source)
    return wrong
