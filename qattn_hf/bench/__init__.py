"""Measure speed and memory of packed and stock caches on this machine, for `qattn bench`.

    from qattn_hf import bench, compare

    settings = {name: recipe.settings for name, recipe in compare.find_recipes(["turbo", "int8"]).items()}
    rows = list(bench.decode.rows([bench.decode.Point(1, 8192)], settings, bench.Heads(), torch.device("cuda")))
    bench.print_table(rows)

`decode`, `prefill` and `generate` are modules with one measurement each. `Point` is the batch and length to measure.
`rows` yields one JSON row for each point and way. A way is one of the things compared: a method's cache, an SDPA
backend, or, in `generate`, a cache with a decode path. `help(bench.decode.rows)` documents a name.
"""

from qattn_hf.bench import decode, generate, prefill
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.model import load_model, random_model
from qattn_hf.bench.picture import draw
from qattn_hf.bench.tables import best_stock, by_point, print_table, table
from qattn_hf.bench.ways import all_ways, default_ways
from qattn_hf.messages.origin import device_name, versions

__all__ = [
    "Heads",
    "all_ways",
    "best_stock",
    "by_point",
    "decode",
    "default_ways",
    "device_name",
    "draw",
    "generate",
    "load_model",
    "prefill",
    "print_table",
    "random_model",
    "table",
    "versions",
]
