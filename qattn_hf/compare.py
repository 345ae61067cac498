"""Compare methods with full precision on a text, for notebooks and programs, as `qattn compare` does.

    from qattn_hf import compare

    recipes = compare.find_recipes(["turbo", "turbo:bits=2", "kivi:bits=4"])
    ids = compare.rows_of(tokenizer, text, rows=4, tokens=1536)          # [4, 1536]
    rows = compare.compare(model, recipes, compare.read_as(ids, steps=128))
    compare.print_table([{"model": "mine", **row} for row in rows])

`help(compare.compare)` documents a name.
"""

from qattn_hf.cache.sizes import Size, size_of
from qattn_hf.fidelity.acceptance import compare_drafts, first_layers, print_drafts
from qattn_hf.fidelity.compare import compare
from qattn_hf.fidelity.needles import FILLER, PromptMaker, all_prompts
from qattn_hf.fidelity.picture import draw
from qattn_hf.fidelity.retrieval import compare_retrieval, print_retrieval, retrieval_table
from qattn_hf.fidelity.rollout import Choice, compare_rollouts, print_rollouts
from qattn_hf.fidelity.tables import print_table, table
from qattn_hf.reading.texts import Reading, made_text, parted, read_as, rows_of
from qattn_hf.recipes.recipe import find_recipe, find_recipes

__all__ = [
    "FILLER",
    "Choice",
    "PromptMaker",
    "Reading",
    "Size",
    "all_prompts",
    "compare",
    "compare_drafts",
    "compare_retrieval",
    "compare_rollouts",
    "draw",
    "find_recipe",
    "find_recipes",
    "first_layers",
    "made_text",
    "parted",
    "print_drafts",
    "print_retrieval",
    "print_rollouts",
    "print_table",
    "read_as",
    "retrieval_table",
    "rows_of",
    "size_of",
    "table",
]
