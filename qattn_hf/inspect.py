"""Statistics and pictures of a model's queries, keys and values, for notebooks and programs: `qattn inspect`.

    from qattn_hf import compare, inspect

    ids = compare.rows_of(tokenizer, text, rows=1, tokens=1024)           # [1, 1024]
    layers = inspect.inspect(model, compare.find_recipe("turbo_sink", None, {}), ids)
    inspect.channel_ranges(layers[0], "layer 0")                          # a matplotlib figure

`help(inspect.inspect)` documents a name.
"""

from qattn_hf.fidelity.inspection import Inspected, inspect
from qattn_hf.fidelity.inspection_pictures import channel_ranges, draw_all, heads, sink_map, value_gaps

__all__ = ["Inspected", "channel_ranges", "draw_all", "heads", "inspect", "sink_map", "value_gaps"]
