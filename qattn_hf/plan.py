"""Predict the longest contexts and largest batches that fit a GPU from a model's config, as `qattn plan` does.

    from qattn_hf import plan

    planner = plan.Planner("Qwen/Qwen3-8B")                      # downloads a config, no weights
    planner.longest(24 * 2**30, planner.way("turbo"))            # tokens of one row
    planner.memory(planner.way("turbo"), batch=8, context=32768) # where the bytes go

`help(plan.Planner)` documents a name.
"""

from qattn_hf.planning.plan import Memory, Planner, Way

__all__ = ["Memory", "Planner", "Way"]
