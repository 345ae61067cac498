"""Measure the KL to full precision of a model with some packed layers and the rest in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, observed
from qattn_hf.model.device import device_of
from qattn_hf.model.layer_kinds import model_layers
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.metrics import divergence
from qattn_hf.reading.stacked import Member, StackedLayers
from qattn_hf.reading.texts import Reading
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State


class Trial(NamedTuple):
    """One layer, by index, packed by one spec, with the layer's constants from the model (`constants`)."""

    layer: int
    spec: LayerSpec
    constants: State = MappingProxyType({})  # type: ignore[assignment]


Numbered = tuple[int, Trial | Sequence[Trial]]
# Called for each layer of each trial and each chunk with scored tokens: index of the trial, index of the layer, and the
# error of the attention output on the scored tokens, `[rows, T, Hq, Dv]`.
Seen = Callable[[int, int, torch.Tensor], None]


def losses(
    model: PreTrainedModel, trials: Sequence[Trial | Sequence[Trial]], reading: Reading, seen: Seen | None = None
) -> Iterator[float]:
    """Measure each trial, and yield its KL in nats per token, mean over the scored tokens of all rows, in order.

    See `token_losses` for the reading.
    """
    yield from (float(kl.mean()) for kl in token_losses(model, trials, reading, seen))


def token_losses(
    model: PreTrainedModel, trials: Sequence[Trial | Sequence[Trial]], reading: Reading, seen: Seen | None = None
) -> Iterator[torch.Tensor]:
    """Yield the KL of each trial in nats, fp32 `[scored tokens]` on the CPU, mean over rows.

    The model reads each chunk twice. The first call is in full precision. Packed layers get the same queries, keys and
    values, and the errors of their outputs are kept. The second call has a row for each trial, and adds the trial's
    errors to its attention outputs. Layers that read a packed layer's keys and values (KV sharing) get errors as well.

    With one packed layer this is exact. With several, the effect of one layer's error on errors of later layers is left
    out.

    Args:
        model: unpatched model. It is left unchanged.
        trials: each is one layer, or several different layers that are packed together. Up to `reading.batch` rows are
            read at once.
        seen: gets the errors of the attention outputs.
    """
    numbered = list(enumerate(trials))
    together = max(1, reading.batch // len(reading.ids))
    for start in range(0, len(trials), together):
        yield from _read(model, numbered[start : start + together], reading, seen)


class _Errors:
    """Observer that keeps the calls of a chunk. After `found` it adds errors of packed outputs to the next calls.

    Args:
        trials: with their indices, one for each row, or group of `rows` rows, of the calls that errors are added to.
        rows, tokens: number of rows of the text, and tokens of each.
        written: index of the layer that writes the keys and values, by the layer that reads them.
    """

    def __init__(
        self,
        trials: Sequence[Numbered],
        rows: int,
        tokens: int,
        written: dict[int, int],
        device: str,
        seen: Seen | None,
    ):
        self.rows, self.seen, self.calls = rows, seen, dict[int, Call]()
        self.errors: dict[int, list[tuple[int, torch.Tensor]]] | None = None
        self.of: list[tuple[int, int]] = []  # the place of each member's trial in the batch, and its index
        members = []
        for place, (i, trial) in enumerate(trials):
            for one in (trial,) if isinstance(trial, Trial) else trial:
                readers = (reader for reader, read in written.items() if read == one.layer)
                members += [Member(at, one.spec, one.constants) for at in (one.layer, *readers)]
                self.of += [(place, i)] * (len(members) - len(self.of))
        self.stacked = StackedLayers(members, device, tokens)

    def __call__(self, call: Call) -> torch.Tensor | None:
        if self.errors is None:
            self.calls[call.layer] = call
            return None
        out = call.out.clone()
        for i, error in self.errors.get(call.layer, ()):
            out[i * self.rows : (i + 1) * self.rows] += error
        return out

    def found(self, unscored: int) -> None:
        """Compute the errors of the kept calls. They are added to the next calls.

        `unscored` is the number of first tokens of these calls whose errors `seen` does not get."""
        self.errors = {}
        outs = self.stacked.outputs(self.calls)
        for (place, i), member, out in zip(self.of, self.stacked.members, outs, strict=True):
            full = self.calls[member.layer].out
            error = (out.float() - full.float()).to(full.dtype)
            self.errors.setdefault(member.layer, []).append((place, error))
            if self.seen is not None and unscored < error.shape[1]:
                self.seen(i, member.layer, error[:, unscored:])
        self.calls.clear()

    def renew(self) -> None:
        """Keep the calls of the next chunk."""
        self.errors = None


def _read(
    model: PreTrainedModel, trials: Sequence[Numbered], reading: Reading, seen: Seen | None
) -> Iterator[torch.Tensor]:
    (rows, tokens), device = reading.ids.shape, device_of(model)
    written = {i: own.reads for i, own in enumerate(model_layers(model.config)) if own and own.reads is not None}
    errors = _Errors(trials, rows, tokens, written, device.type, seen)
    ids = reading.ids.to(device)
    found: list[list[torch.Tensor]] = [[] for _ in trials]
    with observed(model, errors, written):
        full, tried = (feed(model, x, reading.at, unscored=reading.first) for x in (ids, ids.repeat(len(trials), 1)))
        for chunk in full:
            unscored = max(0, reading.first - chunk.start)
            errors.found(unscored)
            logits = next(tried).logits
            errors.renew()
            if chunk.stop > reading.first:
                log_p = chunk.logits[:, unscored:].log_softmax(-1)
                for kl, of_trial in zip(found, logits[:, -log_p.shape[1] :].split(rows), strict=True):
                    kl.append(divergence(log_p, of_trial.log_softmax(-1)).mean(0))
    yield from (torch.cat(kl).cpu() for kl in found)
