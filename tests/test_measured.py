"""The settings that are worth measuring: each method names its own, and every list is made of them."""

from __future__ import annotations

import pytest

from qattn_hf import list_methods
from qattn_hf.methods import PURPOSES, get_method, measured
from qattn_hf.recipes.recipe import find_recipes


@pytest.mark.parametrize("name", list_methods())
def test_every_method_says_which_of_its_settings_are_measured(name):
    """Nobody else lists them, so that what a method forgets to say is measured by nobody."""
    found = get_method(name).measured
    assert {purpose for one in found for purpose in one.purposes.split()} <= set(PURPOSES)
    assert all(recipe.method == name for recipe in find_recipes(one.setting for one in found).values())
    assert len({one.setting for one in found}) == len(found)
    for purpose in ("compare", "bits", "decode"):
        assert any(purpose in one.purposes.split() for one in found), purpose


def test_what_is_measured_for_nothing_known_is_refused():
    with pytest.raises(ValueError, match=r"'speed'.*quality, compare"):
        measured("speed")
