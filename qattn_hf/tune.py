"""Find a recipe for one model within a budget of bits or KL, for notebooks and programs, as `qattn tune` does.

    from qattn_hf import compare, tune

    decide, check = compare.parted(compare.rows_of(tokenizer, text, rows=12, tokens=1024), 4)
    tuned = tune.tune(
        model, compare.find_recipes(["turbo:bits=mixed", "int8"]), compare.read_as(decide), compare.read_as(check),
        tune.Budget(bits=3.25),
    )
    patch(model, recipe=tuned.recipe)

`help(tune.tune)` documents a name.
"""

from qattn_hf.fidelity.picture import draw_sensitivity
from qattn_hf.fidelity.tune import Budget, Tuned, tune

__all__ = ["Budget", "Tuned", "draw_sensitivity", "tune"]
