"""The choice of `patch(model, bits=...)` and its reasons, as plain data for reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Tried:
    """One setting that was tried.

    Attributes:
        setting: as commands spell it.
        bits: bits per value in closed blocks, mean over the packed layers.
        kl: KL to full precision in nats per token, over the probe.
    """

    setting: str
    bits: float
    kl: float


@dataclass(frozen=True)
class Chosen:
    """The choice of `patch(model, bits=...)` or `patch(model, kl=...)`, and its reasons.

    Attributes:
        bits, kl: the budget. One of the two is None.
        setting: the chosen setting.
        setting_bits, setting_kl: bits of the chosen setting, and its KL over the probe.
        reasons: one sentence each.
        facts: what the probe shows about the model's keys, values and attention (`facts.facts_of`).
        tried: all settings within the budget that were tried, by KL.
        read: what the probe read, in words.
        seconds: time of the probe, including earlier choices for the same weights.
        forwards: number of calls of the model.
    """

    bits: float | None
    kl: float | None
    setting: str
    setting_bits: float
    setting_kl: float
    reasons: tuple[str, ...]
    facts: dict[str, float]
    tried: tuple[Tried, ...]
    read: str
    seconds: float
    forwards: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data for JSON."""
        found = asdict(self)
        return {**found, "reasons": list(self.reasons), "tried": [asdict(one) for one in self.tried]}

    def __str__(self) -> str:
        wanted = f"{self.bits:g} bits a value" if self.kl is None else f"a KL of {self.kl:g}"
        took = f"{len(self.tried)} settings, {self.read}, {self.forwards} calls, {self.seconds:.1f} s"
        return f"chosen for {wanted}: {self.setting} ({took}). {' '.join(self.reasons)}"
