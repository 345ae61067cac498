"""Quality and time of automatic choices: `patch(model, bits=...)` compared with the best recorded setting.

    python eval/choose.py FOLDER... --text WIKITEXT --bits 2.5,3.5,4.5,8 --tune 3.5
    python eval/record.py choose -- python eval/choose.py ...

KL is measured as in `eval/released.py`, with a prompt and true decode steps through the packed cache. For each budget
it measures the choice and all settings of `eval/released.py` whose bits in closed blocks fit. Each budget prints one
JSON row: the choice, its KL, the best other setting, their ratio, and the seconds of the probe. `--tune` adds a row
for each number of bits with the seconds of `qattn tune`, the second at which each phase began, the KL of its recipe,
and the best other setting that fits. These bits count everything at 4,096 tokens, as the command does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from released import SHAPES, Model, Task, against, figures, load, log_probabilities

from qattn_hf import patch, report, unpatch
from qattn_hf.attention.observe import packed_layers
from qattn_hf.cache.sizes import bits_total
from qattn_hf.cli.tune import AT_TOKENS, BATCH, CHECK_ROWS, ROWS, STEPS, texts, tokens_for
from qattn_hf.compare import find_recipes, read_as
from qattn_hf.methods import measured_settings
from qattn_hf.model.device import device_of
from qattn_hf.recipes.recipe import Recipe, find_recipe
from qattn_hf.tune import Budget, tune
from qattn_kernels.layer.spec import LayerSpec


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    for folder in options.folders:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (options.rows, options.prompt, options.steps, ())
        model = load(Task(folder, str(options.text), "", *shape, (), False, device))
        full = torch.stack(list(log_probabilities(model, options.prompt)), 1)
        known = {setting: figures(model, setting, full, options.prompt) for setting in _settings(options)}
        for bits in options.bits:
            row = chosen(model, bits, full, options.prompt, known)
            print(json.dumps({"model": model.name, "bits_at_most": bits, **row}), flush=True)
        for bits in options.tune:
            row = tuned(model, bits, full, options.prompt, known)
            print(json.dumps({"model": model.name, "tune_bits": bits, **row}), flush=True)


def _settings(options: argparse.Namespace) -> list[str]:
    return [one for one in options.methods.split(";") if one] or [
        s for s in measured_settings("released") if s != "none"
    ]


def chosen(model: Model, bits: float, full: torch.Tensor, prompt: int, known: dict[str, Any]) -> dict[str, Any]:
    """The row of one budget; `known`: figures of the settings that are recorded."""
    began = time.perf_counter()
    patch(model.module, bits=bits)
    seconds = time.perf_counter() - began
    told = report(model.module).to_dict()["chosen"]
    row = against(model, full, prompt)
    unpatch(model.module)
    within = {s: one["kl"] for s, one in known.items() if "error" not in one and one["bits"] <= bits}
    best = min(within, key=lambda setting: within[setting], default=None)
    return {
        "setting": told["setting"],
        "bits": round(told["setting_bits"], 3),
        **row,
        "best": best,
        "best_kl": within.get(best or ""),
        "ratio": round(row["kl"] / within[best], 3) if best else None,
        "seconds": round(seconds, 1),
        "probe_seconds": round(told["seconds"], 1),
        "forwards": told["forwards"],
        "read": told["read"],
        "probe": {one["setting"]: round(one["kl"], 6) for one in told["tried"]},
        "facts": {name: round(value, 3) for name, value in told["facts"].items()},
    }


def tuned(model: Model, bits: float, full: torch.Tensor, prompt: int, known: dict[str, Any]) -> dict[str, Any]:
    """The row of `qattn tune` as the command runs by default, without a file of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.module.config.name_or_path)
    decide, check = texts(tokenizer, None, None, ROWS, CHECK_ROWS, tokens_for(model.module.config))
    calls: list[int] = []
    counted = model.module.register_forward_pre_hook(lambda *_: calls.append(1))
    phases: dict[str, float] = {}
    began = time.perf_counter()

    def progress(what: str) -> None:
        phases.setdefault("trials" if what.startswith("trials") else what, round(time.perf_counter() - began, 1))

    found = tune(
        model.module,
        find_recipes(measured_settings("tune")),
        read_as(decide, batch=BATCH),
        read_as(check, steps=STEPS, batch=BATCH),
        Budget(bits=bits, at_tokens=AT_TOKENS),
        progress=progress,
    )
    seconds = time.perf_counter() - began
    counted.remove()
    patch(model.module, recipe=found.recipe)
    row = against(model, full, prompt)
    unpatch(model.module)
    sizes = {
        setting: total_bits(model, find_recipe(setting, None, {})) for setting, one in known.items() if "kl" in one
    }
    best = min((s for s, size in sizes.items() if size <= bits), key=lambda setting: known[setting]["kl"], default=None)
    row |= {"bits_total": total_bits(model, found.recipe), "best": best, "best_kl": known[best]["kl"] if best else None}
    counts = {"forwards": len(calls), "trials": len(found.trials), "tried": sum(t["measured"] for t in found.trials)}
    times = {"tune_seconds": round(seconds, 1), "phases": phases}
    expected = {"predicted_kl": found.predicted, "uniform": found.uniform}
    return {**times, **counts, **row, **expected, "recipe": found.recipe.as_yaml()}


def total_bits(model: Model, recipe: Recipe) -> float:
    """The bits per value of the packed layers for a row of 4,096 tokens, everything counted."""
    config = model.module.config
    specs = recipe.for_model(config).layer_specs(config, device_of(model.module).type)
    layers = packed_layers(model.module)
    packed = {i: spec for i, spec in enumerate(specs) if i in layers and isinstance(spec, LayerSpec)}
    return round(bits_total(config, packed, AT_TOKENS, model.module.dtype), 3)


def numbers(text: str) -> list[float]:
    """The numbers of an option, with commas between them."""
    return [float(one) for one in text.split(",") if one]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    shape = SHAPES["smollm2"]
    parser = argparse.ArgumentParser(description="patch(model, bits=...) compared with the best recorded setting.")
    parser.add_argument("folders", nargs="+", help="folders that from_pretrained loads")
    parser.add_argument("--text", type=Path, required=True, help="plain text to read, such as WikiText-2's test part")
    parser.add_argument("--bits", type=numbers, default=[2.5, 3.5, 4.5, 8.0])
    parser.add_argument(
        "--methods", default="", help="settings to compare with, ; between; default: all of released.py"
    )
    parser.add_argument("--rows", type=int, default=shape["rows"], help="rows of the text")
    parser.add_argument("--prompt", type=int, default=3072, help="tokens of a row that are read at once")
    parser.add_argument("--steps", type=int, default=128, help="tokens after them, each a step")
    parser.add_argument("--tune", type=numbers, default=[], help="bits for `qattn tune`, such as 3.5,4.5")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
