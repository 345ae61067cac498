"""Compare mixed recipes with their parents row by row, with standard errors: `python eval/recipes.py DIR`.

    python eval/recipes.py ../shared                                      # DIR/check/yardstick.py over DIR/models
    python eval/recipes.py ../shared --pair "turbo:v_bits=2/turbo:bits=mixed"  # a candidate and its parent

The yardstick supplies the texts, their rows and the KL. A recipe is worth shipping in one of two cases. Its KL is lower
than its parent's by more than two standard errors of the paired difference, at no more `effective_bits_total`, on every
model. Or, as for `turbo_sink`, its extra bits in short contexts buy a far lower KL on models with attention sinks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import patch, report, unpatch
from qattn_hf.recipes.recipe import find_recipe

# recipes of `configs/` and what each was mixed from
PARENTS = {
    "turbo_sink": ("turbo_paper",),
    "turbo_sink_k4v2": ("turbo:bits=mixed", "turbo:bits=mixed,sink_num=0"),
    "turbo_rotated": ("turbo",),
    "int8_rotated": ("int8",),
    "int_flash_int4": ("int_flash:bits=4",),
    "int_flash_rotated": ("int_flash",),
    "low2": ("sinkq", "kivi:bits=2,group_size=128,residual_length=32"),
    "low3": ("turbo:bits=mixed", "turbo_sink_k4v2"),
    "low4": ("turbo", "kivi:bits=4,group_size=128"),
}


class Reading(NamedTuple):
    """KL of each row of text, and bits a value, with everything that the cache holds."""

    kl: torch.Tensor
    bits: float


def load(path: Path) -> ModuleType:
    """The yardstick, as a module."""
    spec = importlib.util.spec_from_file_location("yardstick", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """A model with its texts; readings are kept, since recipes share parents."""

    def __init__(self, yardstick: ModuleType, path: Path, text: str, rows: int, device: str):
        self.yardstick, self.name, self.text, self.rows = yardstick, path.name, text, rows
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.base = yardstick.books(self.model, self.tokenizer, text, rows)[3]
        self.readings: dict[str, Reading] = {}

    def read(self, text: str) -> Reading:
        """The name of a recipe, or `method:key=value,...`, on all rows."""
        if text not in self.readings:
            method, given = self.yardstick.parse_methods(text)[0]
            patch(self.model, recipe=find_recipe(None, method, given))
            _, kl, _, _, cache = self.yardstick.books(self.model, self.tokenizer, self.text, self.rows, self.base)
            self.readings[text] = Reading(torch.tensor(kl), report(cache).to_dict()["effective_bits_total"])
            unpatch(self.model)
        return self.readings[text]

    def compare(self, child: str, parent: str) -> dict[str, Any]:
        """One row: both KLs, their paired difference with its standard error, both bits."""
        ours, theirs = self.read(child), self.read(parent)
        change = ours.kl - theirs.kl
        row = {"model": self.name, "recipe": child, "parent": parent}
        figures = {
            "kl": ours.kl.mean(),
            "parent_kl": theirs.kl.mean(),
            "change": change.mean(),
            "se": change.std() / len(change) ** 0.5,
            "bits": torch.tensor(ours.bits),
            "parent_bits": torch.tensor(theirs.bits),
        }
        return row | {name: round(value.item(), 6) for name, value in figures.items()}


def pairs(given: list[str] | None) -> Iterator[tuple[str, str]]:
    """What to compare: recipe, parent."""
    if given:
        yield from (tuple(pair.split("/", 1)) for pair in given)  # type: ignore[misc]
    else:
        yield from ((name, parent) for name, parents in PARENTS.items() for parent in parents)


def measure(folder: Path, path: Path, device: str, rows: int, given: list[str] | None) -> list[dict[str, Any]]:
    """All rows of one model."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    yardstick = load(folder / "check" / "yardstick.py")
    text = (folder / "data" / "books" / "heldout.txt").read_text(encoding="utf-8")
    model = Model(yardstick, path, text, rows, device)
    return [model.compare(child, parent) for child, parent in pairs(given)]


def main() -> None:
    parser = argparse.ArgumentParser(description="KL of mixed recipes compared with their parents.")
    parser.add_argument("folder", type=Path, help="with check/yardstick.py, models/ and data/")
    parser.add_argument("--pair", action="append", help="RECIPE/PARENT, each a name or method:key=value,...")
    parser.add_argument("--rows", type=int, default=32, help="rows of text")
    options = parser.parse_args()
    paths = sorted(path for path in (options.folder / "models").iterdir() if path.is_dir())
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    with ProcessPoolExecutor(len(paths), mp_context=get_context("spawn")) as pool:
        runs = [
            pool.submit(measure, options.folder, path, devices[i % len(devices)], options.rows, options.pair)
            for i, path in enumerate(paths)
        ]
        for run in runs:
            for row in run.result():
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
