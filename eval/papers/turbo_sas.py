"""TurboAttention, Fig. 5: the polynomial of SAS compared with the exponential; no model is read.

Fails if the polynomial differs from `exp(-x)` on [0, 1] by more than 1.1e-3; if SAS differs from `exp(x)` by more than
that above its threshold, or is not 0 below; or if a least-squares polynomial of degree 2 is as good as the paper's of
degree 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from papers.common import About, Row, Run, column, not_below, row

from qattn_kernels.reference.softmax import sas_exp

ABOUT = About(
    title="TurboAttention, Fig. 5",
    model="",
    missing="the figure is a plot without numbers. SAS is meant to save time, but no gain is recorded. Measure it with "
    "`qattn bench decode --method turbo --method turbo:softmax=sas`, and with `qattn bench prefill`.",
)
COEFFICIENTS = (-0.1025, 0.4626, -0.9922, 0.9996)  # of the paper's equation 15, highest power first
CLOSE, THRESHOLD, MADE = 1.1e-3, -6.0, "exp(-x), x in [0, 1]"


def fitted(degree: int, x: torch.Tensor) -> torch.Tensor:
    """The least-squares polynomial of `exp(-x)`."""
    powers = torch.stack([x**i for i in range(degree + 1)], 1)
    return powers @ torch.linalg.lstsq(powers, torch.exp(-x)[:, None]).solution[:, 0]


def off(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    return {
        "relative_error": ((got - want).abs() / want).max().item(),
        "rmse": (got - want).pow(2).mean().sqrt().item(),
    }


def measure(run: Run | None) -> Iterator[Row]:
    x = torch.linspace(0, 1, 4097, dtype=torch.float64)
    want = torch.exp(-x)
    paper = sum(c * x**i for i, c in enumerate(reversed(COEFFICIENTS)))
    yield row(MADE, "the paper's polynomial", {"coefficients": COEFFICIENTS}, off(torch.as_tensor(paper), want))
    for degree in (4, 3, 2, 1):
        yield row(MADE, f"fitted, degree {degree}", {}, off(fitted(degree, x), want))
    seen = torch.linspace(THRESHOLD, 0, 60001)
    yield row("SAS", f"from {THRESHOLD:g} to 0", {}, off(sas_exp(seen, THRESHOLD).double(), seen.double().exp()))
    below = sas_exp(torch.linspace(-20, THRESHOLD - 1e-3, 1001), THRESHOLD).abs().max().item()
    yield row("SAS", "below", {"largest": 0}, {"largest": below})


def broken(rows: list[Row]) -> list[str]:
    found = {name: error for source in (MADE, "SAS") for name, error in column(rows, source, "relative_error").items()}
    paper, sas = "the paper's polynomial", f"from {THRESHOLD:g} to 0"
    wrong = not_below(
        {**found, "1.1e-3": CLOSE}, [(paper, "1.1e-3"), (sas, "1.1e-3"), (paper, "fitted, degree 2")], "SAS"
    )
    return wrong + ["SAS is not 0 below its threshold"] * any(column(rows, "SAS", "largest").values())
