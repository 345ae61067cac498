"""Speed of `generate` on several GPUs: a model with random weights, split over them, with packed and stock caches.

    torchrun --nproc-per-node 2 eval/several_gpus.py eval/shapes/llama-3.1-8b.json --point 1x4096 --point 1x32768
    python eval/several_gpus.py eval/shapes/llama-3.1-8b.json --layers-on 2 --point 1x4096
    python eval/record.py several-gpus:tp2 -- torchrun ...

Under `torchrun` the model is split by tensor parallelism, a process on each GPU. With `--layers-on N` one process
places its layers on N GPUs in turn, as `device_map="auto"` does. With neither it is on one GPU. The first process
prints one JSON row for each point and way, as `qattn bench generate` does, with `gpus` and `split`. Bytes are
measured on the first GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qattn_hf.bench.generate import Point, rows
from qattn_hf.bench.model import ready
from qattn_hf.bench.ways import all_ways
from qattn_hf.compare import find_recipes

SEED = 0


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = made(options.shape, processes, options.layers_on, device)
    split = "tensors" if processes > 1 else "layers" if options.layers_on > 1 else "none"
    ways = all_ways(find_recipes(options.method), device)
    torch.manual_seed(SEED)  # the processes must draw the same prompts
    for row in rows(options.point, [ways[name] for name in options.way], model, device, options.new_tokens):
        if rank == 0:
            print(json.dumps({"gpus": max(processes, options.layers_on), "split": split, **row}), flush=True)
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def made(shape: str, processes: int, layers_on: int, device: torch.device) -> PreTrainedModel:
    """Make the model of a config file, with random weights, split over processes or GPUs."""
    config = AutoConfig.from_pretrained(shape)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if processes > 1:
        split: dict[str, Any] = {"tp_plan": "auto"}
    elif layers_on > 1:
        split = {"device_map": "auto", "max_memory": shares(config, layers_on)}
    else:
        split = {"device_map": {"": device}}
    # without a checkpoint every weight is missing, and drawn where it belongs
    return ready(kind.from_pretrained(None, config=config, state_dict={}, dtype=torch.bfloat16, **split))


def shares(config: Any, gpus: int) -> dict[int, int]:
    """Return the bytes of weights for each GPU, so that the layers are spread evenly."""
    with torch.device("meta"):
        weights = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters()) * 2
    return {gpu: int(weights / gpus * 1.25) for gpu in range(gpus)}


def point(text: str) -> Point:
    """A point as `ROWSxTOKENS`."""
    rows_, tokens = text.split("x")
    return Point(int(rows_), int(tokens))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of generate on several GPUs.")
    parser.add_argument("shape", help="config file of the model")
    parser.add_argument("--point", type=point, action="append", required=True, help="rows and tokens, such as 1x4096")
    parser.add_argument("--method", action="append", default=[], help="settings that --way names")
    parser.add_argument("--way", action="append", default=[], help="as in `qattn bench generate`")
    parser.add_argument("--layers-on", type=int, default=1, help="GPUs that share the layers")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    options.method = options.method or ["turbo", "int8"]
    path = "eager" if options.layers_on > 1 else "graph"
    options.way = options.way or ["DynamicCache", *(f"{method} {path}" for method in options.method)]
    return options


if __name__ == "__main__":
    main()
