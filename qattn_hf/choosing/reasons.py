"""Explain a choice: what each feature gains over settings without it, and which fact of the model explains it."""

from __future__ import annotations

from qattn_hf.choosing.candidates import Candidate
from qattn_hf.choosing.probe import Probe
from qattn_kernels.formats.traits import compensates
from qattn_kernels.layer.spec import LayerSpec

ALIKE = 0.3  # settings are compared if their bits differ by no more
SPREAD = "a head's largest key channel is {key_spread:.1f} times its median one"
FEATURES = {  # a feature of settings, and the fact that speaks for or against it
    "pool": ("a pool of attention sinks", "three tokens get {sink_share:.0%} of a head's attention"),
    "rotated": ("rotated keys", SPREAD),
    "equalized": ("equalized key channels", SPREAD),
    "compensated": ("key channels that make up for errors", "{key_bias:.0%} of the squares of keys are their mean's"),
}


def features(candidate: Candidate) -> set[str]:
    """Return the `FEATURES` that any packed layer of a candidate has."""
    specs = [spec for spec in candidate.specs if isinstance(spec, LayerSpec)]
    found = {
        "pool": any(spec.sink_pool.num for spec in specs),
        "rotated": any(spec.compute.rotate != "none" for spec in specs),
        "equalized": any(spec.compute.equalize for spec in specs),
        "compensated": any(compensates(spec.k) for spec in specs),
    }
    return {name for name, has in found.items() if has}


def cost_of(candidate: Candidate) -> int:
    """Return how many features a candidate has. The simpler of two equally good candidates is chosen."""
    return len(features(candidate))


def reasons(probe: Probe, tried: list[Candidate], best: Candidate) -> tuple[str, ...]:
    """Return one sentence for the choice, and one for each feature that settings of similar bits differ in."""
    found = [f"It has {best.bits:.2f} bits in closed blocks and loses a KL of {probe.kl_of(best):.5f} over the probe."]
    alike = [one for one in tried if abs(one.bits - best.bits) <= ALIKE]
    for name, (what, fact) in FEATURES.items():
        # only rotated keys can be equalized
        group = [one for one in alike if name != "equalized" or "rotated" in features(one)]
        losses: dict[bool, list[float]] = {True: [], False: []}  # by whether settings have the feature
        for one in group:
            losses[name in features(one)].append(probe.kl_of(one))
        if best in group and losses[True] and losses[False]:
            taken = "Taken" if name in features(best) else "Not taken"
            found.append(
                f"{taken}: {what}, KL {min(losses[True]):.5f} at best with, {min(losses[False]):.5f} without; "
                f"{fact.format(**probe.facts)}."
            )
    return tuple(found)
