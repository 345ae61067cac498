"""Sensitivity of a model to quantization of one layer or head: KL with the rest in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf.chunks import feed
from qattn_hf.device import device_of
from qattn_hf.fidelity.compare import full_logits
from qattn_hf.fidelity.metrics import divergence
from qattn_hf.fidelity.observe import Call, observed
from qattn_hf.fidelity.texts import Reading
from qattn_hf.layer import QAttnLayer
from qattn_hf.layer_kinds import model_layers
from qattn_kernels.layer.spec import LayerSpec


class Trial(NamedTuple):
    """One layer, by index, packed by one spec."""

    layer: int
    spec: LayerSpec


def losses(model: PreTrainedModel, trials: Sequence[Trial], reading: Reading) -> Iterator[float]:
    """Measure each trial, and yield its KL in nats a token, mean over the scored tokens of all rows, in their order.

    The model reads through transformers' own cache; only the trial's layer attends through a packed one, and those that
    read its keys and values (KV sharing). Rows of several trials are read at once, up to `reading.batch` rows.

    Args:
        model: not patched; it is left as it was.
    """
    full = full_logits(model, reading.ids, reading)
    together = max(1, reading.batch // len(reading.ids))
    for start in range(0, len(trials), together):
        yield from _read(model, trials[start : start + together], reading, full)


def _read(
    model: PreTrainedModel, trials: Sequence[Trial], reading: Reading, full: list[torch.Tensor]
) -> Iterator[float]:
    rows, device = len(reading.ids), device_of(model).type
    written = {i: own.reads for i, own in enumerate(model_layers(model.config)) if own and own.reads is not None}
    layers = {  # by trial and layer: one that reads another's keys packs them, too
        (i, layer): QAttnLayer(trial.spec, device_type=device)
        for i, trial in enumerate(trials)
        for layer in (trial.layer, *(reader for reader, read in written.items() if read == trial.layer))
    }

    def replace_output(call: Call) -> torch.Tensor | None:
        tried = written.get(call.layer, call.layer)
        if all(trial.layer != tried for trial in trials):
            return None
        out = call.out.clone()
        for i, trial in enumerate(trials):
            if trial.layer == tried:
                own = slice(i * rows, (i + 1) * rows)
                out[own] = call.of(own).packed_out(layers[i, call.layer]).to(out.dtype)
        return out

    sums, count, full_chunks = [0.0] * len(trials), 0, iter(full)
    with observed(model, replace_output, written):
        for chunk in feed(model, reading.ids.repeat(len(trials), 1).to(device_of(model)), reading.at):
            if chunk.stop > reading.first:
                log_p = next(full_chunks).float().log_softmax(-1)
                count += log_p.shape[0] * log_p.shape[1]
                for i, logits in enumerate(chunk.logits[:, -log_p.shape[1] :].split(rows)):
                    sums[i] += divergence(log_p, logits.log_softmax(-1)).sum().item()
    yield from (total / count for total in sums)
