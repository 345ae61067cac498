"""SinkQ, Fig. 1, 4 to 6 and appendix D: which tokens to keep in full precision, and which have the smallest keys.

- Fig. 1f, on made layers with two sinks: error of attention when N tokens chosen by some criterion are kept, inside or
  outside the statistics of their group.
- Fig. 1c: share of the N smallest keys that are also among the N tokens with most attention.
- Figs 1, 4, 5 and 6: for each layer of the model, the attention of its three smallest keys, and their size relative to
  the mean. `qattn inspect` draws these figures.
- Appendix D sorts tokens by accumulated attention: for each layer, the first tokens' share of all attention, and the
  largest attention divided by the median, in powers of two.

Fails if, for some N that covers the sinks, the smallest keys are not better than random ones, or the largest are better
than random ones, or leaving the sinks in the statistics is better; or if the made sinks are not the smallest keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import papers.paper_sinkq  # noqa: F401  registers the method
import torch
from papers.common import SINKS, About, Claim, Row, Run, column, in_order, layer_error, made_layer, not_below, row

from qattn_hf.fidelity.inspection import inspect
from qattn_hf.model.loading import short_name
from qattn_hf.recipes.recipe import find_recipes

ABOUT = About(
    title="SinkQ, Fig. 1, 4, 5 and 6, appendix D",
    model="meta-llama/Llama-2-7b-chat-hf",
    missing="the figures are plots of layer 10, head 17 of LLaMA-2-7B, without numbers. `qattn inspect MODEL --text "
    "FILE --pictures FOLDER` draws Fig. 1a, b, d, e and 4 to 6 for any model. Appendix D plots sorted scores of "
    "tokens; this table has numbers instead.",
)
MADE = "made, two sinks"
CRITERIA = ("smallest_key", "largest_key", "attention", "random")
COUNTS = (1, 2, 4, 8)
FIRST = (1, 3, 10)  # tokens of most attention


def measure(run: Run) -> Iterator[Row]:
    layer = made_layer()
    for n in COUNTS:
        for select in CRITERIA:
            for out in (True, False):
                way = f"paper_sinkq:sink_num={n},sink_select={select},sink_exclude={str(out).lower()},group_size=32"
                error = layer_error(way, layer)["relative_l1"]
                yield row(MADE, f"{n} {select}{'' if out else ', in statistics'}", {}, {"relative_l1": error})
    weights = made_mass(layer[0], layer[1])
    for n in (2, 8, 32):
        yield row(MADE, f"overlap of {n}", {}, {"overlap": overlap(layer[1][0].abs().sum(-1), weights, n)})
    for i, found in enumerate(inspect(run.model, find_recipes([SINKS])[SINKS], run.reading.ids[:1])):
        small = found.key_norms.topk(3, largest=False).indices
        mass = found.mass.gather(1, small).sum(1).mean().item()
        size = (found.key_norms.gather(1, small).mean(1) / found.key_norms.mean(1)).mean().item()
        ours = {"mass": mass, "size": size, "overlap of 3": overlap(found.key_norms, found.mass, 3)}
        yield row(short_name(run.name), f"layer {i}, smallest 3 keys", {}, ours)
        yield row(short_name(run.name), f"layer {i}, accumulated attention", {}, accumulated(found.mass))


def made_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What each token of each head gets of the attention of the queries that see it, their mean."""
    tokens = q.shape[2]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = (q[0] @ k[0].mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights.sum(1) / torch.arange(tokens, 0, -1)


def overlap(norms: torch.Tensor, mass: torch.Tensor, n: int) -> float:
    """Share of the `n` smallest keys `[H, S]` that are among the `n` tokens of most attention, mean over heads."""
    small, much = norms.topk(n, largest=False).indices, mass.topk(n).indices
    return (small[..., None] == much[:, None]).any(-1).float().mean().item()


def accumulated(mass: torch.Tensor) -> dict[str, float]:
    """Of tokens by what they got from all queries, `mass` `[H, S]` being the mean over those that see a token."""
    scores = (mass * torch.arange(mass.shape[1], 0, -1)).sort(-1, descending=True).values
    share = scores.cumsum(-1) / scores.sum(-1, keepdim=True)
    found = {f"first {n}": share[:, n - 1].mean().item() for n in FIRST}
    return {**found, "log2 of first by median": (scores[:, 0] / scores.median(-1).values).log2().mean().item()}


def broken(rows: list[Row]) -> list[str]:
    error, shared = column(rows, MADE, "relative_l1"), column(rows, MADE, "overlap")
    wrong = []
    for n in COUNTS[1:]:
        small, large, chance = f"{n} smallest_key", f"{n} largest_key", f"{n} random"
        wrong += not_below(error, [(small, chance), (chance, large), (small, f"{small}, in statistics")], MADE)
    if shared["overlap of 2"] < 1:
        wrong.append(f"{MADE}: the smallest keys are not the sinks")
    return wrong


CLAIMS = (
    Claim(
        "keeping the tokens of the smallest keys is the best criterion (Fig. 1f)",
        in_order("relative_l1", orders=[(f"{n} smallest_key", f"{n} attention") for n in COUNTS]),
        "beyond the sinks small keys mean nothing, while attention weights every error; but attention is known only "
        "after a token was read, and its key before",
    ),
)
