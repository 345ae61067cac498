"""Generate with a model that is split over the processes of this launch, once for each settings of a method.

The first process prints a line of JSON for each.

    torchrun --nproc-per-node 2 tests/split_model.py FOLDER METHOD LIST_OF_SETTINGS_AS_JSON PROMPT_TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))  # `helpers` imports `papers` from there

import torch
from helpers import random_ids
from transformers import AutoModelForCausalLM

from qattn_hf import RecipeError, patch, release, report


def main(folder: str, method: str, settings: str, tokens: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    for chosen in json.loads(settings):
        found = generated(model, method, chosen, int(tokens))
        if torch.distributed.get_rank() == 0:
            print(json.dumps(found), flush=True)
    if hasattr(model, "_qattn"):
        release(model)  # captured steps hold the communicator
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def generated(model: Any, method: str, settings: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Logits, constants of layers and parts of the report, or why the settings were refused."""
    found: dict[str, Any] = {"device": str(model.device), "world_size": torch.distributed.get_world_size()}
    try:
        patch(model, method, **settings)
    except RecipeError as error:
        return {**found, "refused": str(error)}
    wanted = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(random_ids(2, tokens).to(model.device), **wanted)
    held = report(model).to_dict()
    found |= {key: held[key] for key in ("packed_tokens", "kv_bytes", "decode", "decode_reason", "impl")}
    found["constants"] = [{name: x.tolist() for name, x in layer.items()} for layer in model._qattn.constants]
    found["bits_per_head"] = [layer["bits_per_head"] for layer in held["layers"]]
    return {**found, "logits": torch.stack(out.logits).tolist()}


if __name__ == "__main__":
    main(*sys.argv[1:])
