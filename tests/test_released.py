"""Claims of the front page on a released checkpoint, by the reference: `eval/released.py` in small.

SmolLM2's folder is `.cache/smollm2`, or what `QATTN_SMOLLM2` names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from test_eval_scripts import ROOT, script

FOLDER = Path(os.environ.get("QATTN_SMOLLM2", ROOT / ".cache" / "smollm2"))
TEXT = ROOT.parent / "shared" / "data" / "wikitext2" / "wiki.test.raw"
SETTINGS = (
    "none", "int8_rotated", "turboquant", "turbo", "turbo:sink_num=0", "turbo_rotated", "low4", "low3", "low2", "sinkq",
    "kivi:bits=2,group_size=128,residual_length=32",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,  # two minutes
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason="needs SmolLM2: `python eval/checkpoints.py fetch smollm2 .cache/smollm2`",
    ),
    pytest.mark.skipif(not TEXT.is_file(), reason="needs WikiText-2 in ../shared/data"),
]


@pytest.fixture(scope="module")
def kl():
    """KL of each setting: 2 rows of 640 tokens read at once, 24 steps."""
    sys.path.insert(0, str(ROOT / "eval"))  # the script imports its neighbour
    try:
        released = script("released")
    finally:
        sys.path.remove(str(ROOT / "eval"))
    task = released.Task(str(FOLDER), str(TEXT), "", 2, 640, 24, (), SETTINGS, False, "cpu")
    model = released.load(task)
    full = torch.stack(list(released.log_probabilities(model, task.prompt)), 1)
    rows = {setting: released.figures(model, setting, full, task.prompt) for setting in SETTINGS}
    assert not any("error" in row for row in rows.values()), rows
    return {setting: row["kl"] for setting, row in rows.items()}


# A KL of so few steps has a standard error of a tenth to a half of itself, so each ratio leaves the factor of two.


def test_none_is_full_precision(kl):
    assert abs(kl["none"]) < 1e-5


@pytest.mark.parametrize("setting", ["int8_rotated", "turboquant"])
def test_8_bits_are_safe(kl, setting):
    assert kl[setting] < 0.004  # .0020 and .0029 over 16 rows


def test_a_pool_takes_most_of_the_loss_at_4_bits_away(kl):
    assert kl["turbo"] < 0.6 * kl["turbo:sink_num=0"]  # .0103 and .0345 over 16 rows


@pytest.mark.parametrize("setting", ["turbo_rotated", "low4"])
def test_a_rotation_takes_more_of_it_away(kl, setting):
    assert kl[setting] < 0.8 * kl["turbo"]  # .0055, .0036 and .0102 over 16 rows


def test_low3_loses_about_what_turbo_loses(kl):
    assert kl["low3"] < 2 * kl["turbo"]  # .0120 and .0102 over 16 rows


@pytest.mark.parametrize("other", ["sinkq", "kivi:bits=2,group_size=128,residual_length=32"])
def test_low2_loses_least_at_its_bits(kl, other):
    assert kl["low2"] < kl[other] / 3  # .048, .367 and .508 over 16 rows
