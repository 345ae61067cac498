"""Measure candidates on one short row. All candidates share the same calls, each in separate rows.

Every layer of a candidate's row gets the error that it makes on full-precision inputs. Errors of different layers
combine in the model (`reading.sensitivity`). The reference computes all layers at once, because compiling kernels for
every setting takes longer than the probe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import Passes, constants
from qattn_hf.attention.observe import packed_layers
from qattn_hf.choosing.candidates import Candidate
from qattn_hf.choosing.facts import facts_of
from qattn_hf.choosing.text import PASSES, tokens_of
from qattn_hf.errors import UnsupportedError
from qattn_hf.model.device import device_of
from qattn_hf.model.layer_kinds import ModelLayerSpec
from qattn_hf.reading.sensitivity import Trial, token_losses
from qattn_hf.reading.texts import Reading
from qattn_hf.saved.writer import identity
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec

SCORED = 256  # last tokens: one half continues the text, the other half repeats facts from the text
TOGETHER = 16  # candidates read in the same calls


@dataclass
class Probe:
    """What is known about a model's weights.

    Attributes:
        ids: int64 `[1, T]`, the tokens read.
        read: the kind of tokens, in words.
        facts: `facts.facts_of`.
        kl: KL of each setting that was tried (`_kl_of`), by its layers' specs as text.
        seconds, forwards: time and calls of the model spent until now.
    """

    ids: torch.Tensor
    read: str
    facts: dict[str, float]
    kl: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    forwards: int = 0

    def kl_of(self, candidate: Candidate) -> float:
        """Return the KL to full precision of a measured candidate, in nats per token."""
        return self.kl[_key(candidate)]

    def lacks(self, candidate: Candidate) -> bool:
        """Return whether a candidate is still to be measured."""
        return _key(candidate) not in self.kl


_known: dict[str, Probe] = {}  # by `fingerprint`


def fingerprint(model: PreTrainedModel) -> str | None:
    """Return a hash that identifies a model's weights and precision, or None if weights cannot be read (offloaded)."""
    try:
        found = {**identity(model), "device": device_of(model).type, "name": model.config.name_or_path}
    except UnsupportedError:
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def known_probe(model: PreTrainedModel) -> Probe | None:
    """Return the probe of these weights in this process, or None if there is none yet."""
    return _known.get(fingerprint(model) or "")


def probe_of(model: PreTrainedModel) -> Probe:
    """Return the probe of these weights, and begin it if needed. The model must not be patched."""
    if (probe := known_probe(model)) is not None:
        return probe
    began = time.perf_counter()
    ids, read = tokens_of(model)
    probe = Probe(ids, read, facts_of(model, ids), forwards=1 + PASSES * ("sampled" in read))
    probe.seconds = time.perf_counter() - began
    if (name := fingerprint(model)) is not None:
        _known[name] = probe
    return probe


def measure(model: PreTrainedModel, probe: Probe, candidates: Sequence[Candidate]) -> None:
    """Add the KLs that a probe lacks. The model must not be patched, and is left unchanged."""
    missing = [one for one in candidates if probe.lacks(one)]
    if not missing:
        return
    began, passes = time.perf_counter(), Passes()
    reading = _reading(probe.ids)
    trials = [_trial(model, one, passes) for one in missing]
    found = [_kl_of(kl) for kl in token_losses(model, trials, reading)]  # all, before the probe is changed
    probe.kl |= dict(zip(map(_key, missing), found, strict=True))
    readings = 2 * -(-len(missing) // TOGETHER)  # in full precision, and with errors
    probe.forwards += readings * (len(reading.at) - 1) + len(passes)
    probe.seconds += time.perf_counter() - began


def _kl_of(kl: torch.Tensor) -> float:
    """Return the geometric mean of the KLs of both halves.

    Each half alone can favour a setting that does badly on long texts. Most loss comes from tokens that repeat earlier
    text."""
    first, second = (float(half.mean()) for half in kl.tensor_split(2))
    return math.sqrt(max(first, 0.0) * max(second, 0.0))


def _reading(ids: torch.Tensor) -> Reading:
    """Make a reading: a prompt in one call, then calls with as many tokens as decode kernels take."""
    tokens = ids.shape[1]
    prompt = max(tokens // 2, tokens - SCORED)
    return Reading(ids, [0, *range(prompt, tokens, SHORT_CALL), tokens], prompt, TOGETHER)


def _trial(model: PreTrainedModel, candidate: Candidate, passes: Passes) -> list[Trial]:
    """Make a trial of all layers of a candidate, with the layers' constants from the model."""
    found = constants(model, candidate.specs, passes)
    layers = packed_layers(model)
    return [Trial(i, _by_reference(candidate.specs[i]), found[i]) for i in layers]


def _by_reference(spec: LayerSpec | ModelLayerSpec) -> LayerSpec:
    assert isinstance(spec, LayerSpec)
    return dataclasses.replace(spec, impl="reference")


def _key(candidate: Candidate) -> str:
    return "; ".join(dict.fromkeys(repr(spec) for spec in candidate.specs))
