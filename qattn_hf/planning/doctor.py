"""What would run, and how: this machine, a model's layers and their kernels, from a config. For `qattn doctor`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from qattn_hf.patching.warm import shapes
from qattn_hf.planning.cards import Card
from qattn_hf.planning.check import Check, check
from qattn_hf.planning.machine import chip_for, machine, problems
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.chip import as_chip
from qattn_kernels.layer.support import no_triton

if TYPE_CHECKING:
    from qattn_kernels.step.tiles import Use


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`.

    Attributes:
        machine: `machine.machine`.
        check: what `patch` would do with the model.
        kernels: for each kind of layer that kernels compute, its `layers` and their `kernels` (`step.tiles.Use`).
        problems: a sentence for each thing that would not run. Empty: everything runs.
    """

    machine: dict[str, Any]
    check: Check
    kernels: list[dict[str, Any]]
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold, with the fields of `Check` at the top."""
        kernels = [{**row, "kernels": [_plain(use) for use in row["kernels"]]} for row in self.kernels]
        return {**asdict(self.check), "machine": self.machine, "kernels": kernels, "problems": self.problems}


def diagnose(
    model: str | Path,
    recipe: Recipe,
    *,
    card: Card | None = None,
    device_type: str = "cuda",
    dtype: torch.dtype | None = None,
    at_tokens: int = 32768,
    weight_bytes: int | None = None,
) -> Diagnosis:
    """Find out whether and how a model runs, from its config alone. Nothing is compiled or launched.

    Args:
        model: folder or hub name whose config is read.
        recipe: the method and its settings.
        card: answer for this GPU instead of the machine's. Without both, kernels are chosen for an H200.
        device_type, at_tokens, weight_bytes: as in `check`.
        dtype: dtype of the model. None: the config's, else bf16.

    Raises:
        RecipeError: a setting that is invalid for this model.
        OSError: the config is missing.
    """
    here = machine(card)
    on_card: AbstractContextManager[None] = nullcontext() if device_type == "cpu" else as_chip(chip_for(card))
    with on_card:
        found = check(model, recipe=recipe, device_type=device_type, at_tokens=at_tokens, weight_bytes=weight_bytes)
        kernels = [] if found.refused or no_triton("cuda") else _kernels(model, recipe, device_type, dtype)
    refused = [] if found.refused is None else [f"patch refuses the model: {found.refused}"]
    asked_here = card is None and device_type == "cuda"
    return Diagnosis(here, found, kernels, [*refused, *(problems(here) if asked_here else [])])


def _plain(use: Use) -> dict[str, Any]:
    return {**use._asdict(), "tiles": None if use.tiles is None else use.tiles._asdict()}


def _kernels(model: str | Path, recipe: Recipe, device_type: str, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """Return `Diagnosis.kernels`."""
    from qattn_kernels.step.tiles import uses  # loads Triton

    config = AutoConfig.from_pretrained(model)
    if not recipe.settings.packs():
        return []
    recipe = recipe.for_model(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    found = shapes(config, enumerate(recipe.layer_specs(config, device_type)), dtype, torch.device("meta"))
    return [{"layers": layers, "kernels": uses(shape)} for shape, layers in found.items()]
