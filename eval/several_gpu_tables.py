"""Tables of `docs/several-gpus.md`: a model on one GPU and split over several, and what a prefix costs to move."""

from __future__ import annotations

from table import Table, each

MODELS = {32: "8B", 80: "70B"}  # Llama 3.1 by its layers
SPLITS = {"none": "one GPU", "layers": "layers", "tensors": "tensors"}
WAYS = ("DynamicCache", "turbo eager", "turbo graph", "int8 graph")
TITLES = {"DynamicCache": "stock", "turbo eager": "`turbo`, eager", "turbo graph": "`turbo`", "int8 graph": "`int8`"}
KB = 1e3

TABLES = (
    Table("several-gpus", "several-gpus",
          "| model | split | GPUs | prompts || {title} |",
          "| {model} | {over} | {gpus} | {batch} x {context:,} || {ms_per_token:.1f} ms, {kv_bytes:GiB.2f} GiB |",
          each(lambda row: "error" not in row and row["way"] in WAYS,
               model=lambda row: MODELS[row["num_hidden_layers"]], over=lambda row: SPLITS[row["split"]],
               title=lambda row: TITLES[row["way"]]),
          "way", WAYS),
    Table("move-prefix", "move-prefix",
          "| cache | KB a token | save | load | load, unchecked | GPU to GPU |",
          "| `{setting}` | {kb:.1f} | {save_gib_per_s:.2f} GiB/s | {load_gib_per_s:.2f} GiB/s "
          "| {load_unchecked_gib_per_s:.2f} GiB/s | {gpu_to_gpu_gib_per_s:.0f} GiB/s |",
          each(kb=lambda row: row["bytes_per_token"] / KB)),
)  # fmt: skip
