"""Families of models: what a method's defaults become for models of one type, from `configs/families/*.yaml`.

family: Qwen2, Qwen2.5
model_types: [qwen2]            # `config.model_type` of the decoder
waits: null                     # which checkpoints are refused today, and for what they wait
methods:
  int8:
    settings: {smooth_k: true}  # in place of the method's defaults; without any they stand
    why: one or two sentences
    source: where that is known from
    advice: null                # what serves this family better than the method can
    measured: null              # the file of `eval/results/` that shows it for a model of this family
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
from qattn_hf.yaml_reader import read_yaml


class Section(BaseModel):
    """What a family says of one method; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    settings: dict[str, Any] = {}
    why: str = Field(min_length=1)
    source: str = Field(min_length=1)
    advice: str | None = None
    measured: str | None = None


class Family(BaseModel):
    """One file of `configs/families/`; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: str = Field(min_length=1)
    model_types: list[str] = Field(min_length=1)
    waits: str | None = None
    methods: dict[str, Section]


@dataclass(frozen=True)
class Chosen:
    """What a family says of the method that was asked for, its settings less those that a user set otherwise."""

    model_type: str
    section: Section

    def __str__(self) -> str:
        measured = self.section.measured
        return f"{self.model_type}, " + ("unmeasured" if measured is None else f"measured in {measured}")

    def below(self, method: type[Method], given: dict[str, Any]) -> Chosen:
        """What holds of it with the `given` settings on top. If that is not all of it, it is not what was measured."""
        section = self.section
        left = method.left_of(section.settings, given)
        measured = section.measured if left == section.settings else None
        return dataclasses.replace(self, section=section.model_copy(update={"settings": left, "measured": measured}))

    def to_dict(self) -> dict[str, Any]:
        """For reports: the model type and what the file says."""
        return {"model_type": self.model_type, **self.section.model_dump()}


@functools.cache
def list_families() -> tuple[Family, ...]:
    """All families: the files of the folder, by name."""
    return tuple(_read(path) for path in sorted((configs_dir() / "families").glob("*.yaml")))


def _read(path: Path) -> Family:
    """One file.

    Raises:
        RecipeError: it is not YAML, or a key is unknown, missing or of a wrong type; the message names file and key.
    """
    try:
        return Family.model_validate(read_yaml(path))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise RecipeError(f"{path}: {'; '.join(wrong)}") from None


def find_family(model_type: str, method: str) -> Chosen | None:
    """What the family of a model type says of a method, or None."""
    for family in list_families():
        if model_type in family.model_types and method in family.methods:
            return Chosen(model_type, family.methods[method])
    return None
