"""A method that a model chooses itself: `patch(model, bits=3.5)` or `patch(model, kl=0.01)`.

`choose.py` finds the recipe, `candidates.py` says which there are, `probe.py` measures them on one short text,
`text.py` has that text, `facts.py` and `reasons.py` what it shows of the model. A report
tells `qattn_hf.recipes.chosen`.
"""
