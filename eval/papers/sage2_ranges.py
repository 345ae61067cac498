"""SageAttention2, Figs 4 and 5: outlier channels in Q, K and V, and INT4 codes of Q before and after smoothing.

Rows are made layers and the model's layers. They have the mean of a channel divided by its deviation, for the largest
channel, averaged over heads (Fig. 4), and the bits of information in the codes of Q, at most 3.9 with 15 levels (Fig.
5).

Fails if in some made layer, which is biased as in Fig. 4, smoothing does not give the codes more information. For a
model's layers this is printed and is no failure.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from papers import sage2
from papers.common import About, Claim, Row, Run, column, first_row, not_below, row, sources

from qattn_hf.model.loading import short_name

ABOUT = About(
    title="SageAttention2, Figs 4 and 5",
    model="meta-llama/Llama-3.1-8B",
    missing="the figures are plots, of Llama3.1 and CogvideoX, and print no numbers.",
)
MEAN, PLAIN, SMOOTH = "mean of layers", "information, plain", "information, smoothed"


def bias(x: torch.Tensor) -> float:
    return (x.mean(-2).abs() / x.std(-2).clamp(min=1e-6)).amax(-1).mean().item()


def information(q: torch.Tensor) -> float:
    """Bits of INT4 codes `[H, S, D]` of a scale a thread, mean over heads."""
    group = sage2.groups(q.shape[1], "thread", True)
    top = torch.zeros(len(q), int(group.max()) + 1).scatter_reduce_(
        1, group.expand(len(q), -1), q.abs().amax(-1), "amax"
    )
    codes = torch.round(q / (top / 7).clamp(min=1e-12)[:, group, None]).long() + 7
    share = torch.stack([torch.bincount(head.flatten(), minlength=15) for head in codes]).double()
    share = share / share.sum(-1, keepdim=True)
    return (torch.special.entr(share).sum(-1) / torch.tensor(2.0).log()).mean().item()


def measure(run: Run) -> Iterator[Row]:
    for source, layers in (("made", sage2.made()), (short_name(run.name), first_row(run))):
        found = []
        for i, (q, k, v) in enumerate(layers):
            ours = {"Q": bias(q), "K": bias(k), "V": bias(v), PLAIN: information(q)}
            found.append({**ours, SMOOTH: information(q - q.mean(-2, keepdim=True))})
            yield row(source, f"layer {i}", {}, found[-1])
        yield row(f"{source}, all", MEAN, {}, {key: sum(f[key] for f in found) / len(found) for key in found[0]})


def broken(rows: list[Row]) -> list[str]:
    wrong = []
    plain, smooth = column(rows, "made", PLAIN), column(rows, "made", SMOOTH)
    for name in plain:
        wrong += not_below({"plain": plain[name], "smoothed": smooth[name]}, [("plain", "smoothed")], name)
    return wrong


def less_informed(rows: list[Row]) -> list[str]:
    """Where smoothing takes information off the codes of a mean layer."""
    wrong = []
    for source in sources(rows):
        plain, smooth = (column(rows, source, figure).get(MEAN) for figure in (PLAIN, SMOOTH))
        if plain is not None and smooth is not None:
            wrong += not_below({"plain": plain, "smoothed": smooth}, [("plain", "smoothed")], f"{source}, bits")
    return wrong


CLAIMS = (
    Claim(
        "smoothed queries use the range of INT4 more uniformly (Fig. 5)",
        less_informed,
        "the measure counts the codes of all channels together, and biases of many sizes fill the range as well, "
        "although they do not distinguish queries",
    ),
)
