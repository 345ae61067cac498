"""What `patch(model, bits=...)` chose and why, as plain data for reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Tried:
    """One setting that was tried.

    Attributes:
        setting: as commands spell it. bits: of a value in closed blocks, mean over the packed layers.
        kl: to full precision in nats a token, over the probe.
    """

    setting: str
    bits: float
    kl: float


@dataclass(frozen=True)
class Chosen:
    """What `patch(model, bits=...)` or `patch(model, kl=...)` chose, and why.

    Attributes:
        bits, kl: the budget, of which one is None.
        setting: what was chosen. setting_bits, setting_kl: its bits and its KL over the probe.
        reasons: one sentence each.
        facts: what the probe shows of the model's keys, values and attention (`facts.Facts`).
        tried: all settings within the budget that were tried, by KL.
        read: what the probe read, in words. seconds: of the probe, earlier choices for the same weights included.
        forwards: calls of the model that it took.
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
        """All fields as JSON has them."""
        found = asdict(self)
        return {**found, "reasons": list(self.reasons), "tried": [asdict(one) for one in self.tried]}

    def __str__(self) -> str:
        wanted = f"{self.bits:g} bits a value" if self.kl is None else f"a KL of {self.kl:g}"
        took = f"{len(self.tried)} settings, {self.read}, {self.forwards} calls, {self.seconds:.1f} s"
        return f"chosen for {wanted}: {self.setting} ({took}). {' '.join(self.reasons)}"
