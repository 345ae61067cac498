"""What a model loses where some of its layers are packed and the rest is in full precision, as KL to full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, observed
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.model.device import device_of
from qattn_hf.model.layer_kinds import model_layers
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.metrics import divergence
from qattn_hf.reading.texts import Reading, full_logits
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State


class Trial(NamedTuple):
    """One layer, by index, packed by one spec, with the constants that such a layer has of its model (`constants`)."""

    layer: int
    spec: LayerSpec
    constants: State = MappingProxyType({})  # type: ignore[assignment]


def losses(model: PreTrainedModel, trials: Sequence[Trial | Sequence[Trial]], reading: Reading) -> Iterator[float]:
    """Measure each trial, and yield its KL in nats a token, mean over the scored tokens of all rows, in their order.

    The model reads through transformers' own cache; only the trial's layer attends through a packed one, and those that
    read its keys and values (KV sharing). Rows of several trials are read at once, up to `reading.batch` rows.

    Args:
        model: not patched; it is left as it was.
        trials: each of one layer, or several of different layers that are packed together.
    """
    full = full_logits(model, reading.ids, reading)
    together = max(1, reading.batch // len(reading.ids))
    for start in range(0, len(trials), together):
        yield from _read(model, trials[start : start + together], reading, full)


def _read(
    model: PreTrainedModel, trials: Sequence[Trial | Sequence[Trial]], reading: Reading, full: list[torch.Tensor]
) -> Iterator[float]:
    rows, device = len(reading.ids), device_of(model).type
    written = {i: own.reads for i, own in enumerate(model_layers(model.config)) if own and own.reads is not None}
    layers: dict[tuple[int, int], QAttnLayer] = {}
    for i, trial in enumerate(trials):
        for one in (trial,) if isinstance(trial, Trial) else trial:
            # one that reads another's keys packs them, too
            for at in (one.layer, *(reader for reader, read in written.items() if read == one.layer)):
                layers[i, at] = QAttnLayer(one.spec, device_type=device)
                layers[i, at].constants = dict(one.constants)

    def replace_output(call: Call) -> torch.Tensor | None:
        tried = [i for i in range(len(trials)) if (i, call.layer) in layers]
        if not tried:
            return None
        out = call.out.clone()
        for i in tried:
            own = slice(i * rows, (i + 1) * rows)
            out[own] = call.of(own).packed_out(layers[i, call.layer]).to(out.dtype)
        return out

    sums, count, full_chunks = [0.0] * len(trials), 0, iter(full)
    with observed(model, replace_output, written):
        ids = reading.ids.repeat(len(trials), 1).to(device_of(model))
        for chunk in feed(model, ids, reading.at, unscored=reading.first):
            if chunk.stop > reading.first:
                log_p = next(full_chunks).float().log_softmax(-1)
                count += log_p.shape[0] * log_p.shape[1]
                for i, logits in enumerate(chunk.logits[:, -log_p.shape[1] :].split(rows)):
                    sums[i] += divergence(log_p, logits.log_softmax(-1)).sum().item()
    yield from (total / count for total in sums)
