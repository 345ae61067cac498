"""Defaults of a method for a family of models, from `configs/families/*.yaml`.

family: Qwen2, Qwen2.5
model_types: [qwen2]            # `config.model_type` of the decoder
waits: null                     # layers or checkpoints that are unpacked so far, and why
methods:
  int8:
    settings: {smooth_k: true}  # override the method's defaults; {} keeps them
    why: one or two sentences
    source: paper, report or code that says so
    advice: null                # a better method for this family
    measured: null              # file of `eval/results/` with figures of a model of this family
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qattn_hf.assets import configs_dir
from qattn_hf.errors import RecipeError
from qattn_hf.methods import Method
from qattn_hf.recipes.yaml_reader import read_yaml


class Section(BaseModel):
    """Entry of a family for one method. The module's docstring documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    settings: dict[str, Any] = {}
    why: str = Field(min_length=1)
    source: str = Field(min_length=1)
    advice: str | None = None
    measured: str | None = None


class Family(BaseModel):
    """One file of `configs/families/`. The module's docstring documents the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: str = Field(min_length=1)
    model_types: list[str] = Field(min_length=1)
    waits: str | None = None
    methods: dict[str, Section]


@dataclass(frozen=True)
class FamilyDefaults:
    """A family's entry for a recipe's method, without the settings to which the user gave other values."""

    model_type: str
    section: Section

    def __str__(self) -> str:
        measured = self.section.measured
        return f"{self.model_type}, " + ("unmeasured" if measured is None else f"measured in {measured}")

    def below(self, method: type[Method], overrides: dict[str, Any]) -> FamilyDefaults:
        """Return the entry without settings that `overrides` replace. `measured` is dropped with them."""
        section = self.section
        settings = method.not_overridden(section.settings, overrides)
        measured = section.measured if settings == section.settings else None
        return dataclasses.replace(
            self, section=section.model_copy(update={"settings": settings, "measured": measured})
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the model type and all fields of the entry, for reports."""
        return {"model_type": self.model_type, **self.section.model_dump()}


@functools.cache
def list_families() -> tuple[Family, ...]:
    """Return all families: the files of `configs/families/`, by file name."""
    return tuple(_read(path) for path in sorted((configs_dir() / "families").glob("*.yaml")))


def _read(path: Path) -> Family:
    """Read and check one family file.

    Raises:
        RecipeError: the file is not YAML, or a key is unknown, missing or has a wrong type. The message names file and
            key.
    """
    try:
        return Family.model_validate(read_yaml(path))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise RecipeError(f"{path}: {'; '.join(problems)}") from None


def find_family(model_type: str, method: str) -> FamilyDefaults | None:
    """Return the defaults of a method for a `config.model_type`, or None if no family file names both."""
    for family in list_families():
        if model_type in family.model_types and method in family.methods:
            return FamilyDefaults(model_type, family.methods[method])
    return None
