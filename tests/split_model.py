"""Generates with a model that is split over the processes that started this; the first prints JSON.

torchrun --nproc-per-node 2 tests/split_model.py FOLDER METHOD SETTINGS_AS_JSON PROMPT_TOKENS
"""

from __future__ import annotations

import json
import sys

import torch
from helpers import random_ids
from transformers import AutoModelForCausalLM

from qattn_hf import RecipeError, patch, report


def main(folder: str, method: str, settings: str, tokens: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    found: dict[str, object] = {"device": str(model.device), "world_size": torch.distributed.get_world_size()}
    try:
        patch(model, method, **json.loads(settings))
    except RecipeError as error:
        found["refused"] = str(error)
    else:
        wanted = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
        out = model.generate(random_ids(2, int(tokens)).to(model.device), **wanted)
        held = report(model).to_dict()
        found |= {key: held[key] for key in ("packed_tokens", "kv_bytes", "decode", "decode_reason", "impl")}
        found["bits_per_head"] = [layer["bits_per_head"] for layer in held["layers"]]
        found["logits"] = torch.stack(out.logits).tolist()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
