"""Let a model choose its method: `patch(model, bits=3.5)` or `patch(model, kl=0.01)`.

`choose.py` finds the recipe, `candidates.py` lists the settings to try, and `probe.py` measures them on one short text
from `text.py`. `facts.py` and `reasons.py` explain the choice, and `qattn_hf.recipes.chosen` keeps it for a report.
"""
