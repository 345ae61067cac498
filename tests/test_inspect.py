"""`qattn inspect` compared with plain formulas over the same text: queries, keys, values, sinks and bits."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import QAttnError, patch, report
from qattn_hf.attention.observe import Call, observed
from qattn_hf.fidelity import inspection
from qattn_hf.fidelity.inspection import Inspected, inspect
from qattn_hf.fidelity.inspection_pictures import channel_ranges, heads, value_gaps
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.recipes.recipe import find_recipes
from qattn_kernels.layer.scores import Scores

TOKENS, METHOD = 150, "turbo:bits=mixed,sink_num=2,sink_window=0"


@pytest.fixture(scope="module")
def seen():
    """What was found in chunks of 40 tokens, and what one call of the second layer computed with."""
    model, ids, calls = tiny_llama(initializer_range=0.3), random_ids(1, TOKENS), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inspection, "CHUNK", 40)
        layers = inspect(model, find_recipes([METHOD])[METHOD], ids)
    with torch.inference_mode(), observed(model, lambda call: calls.append(call)):
        model(ids)
    return layers, calls[1]


def test_ranges_gaps_and_norms_are_the_plain_formulas(seen):
    layers, call = seen
    found, sides = layers[1], {"query": call.query[0], "key": call.keys[0], "value": call.values[0]}
    for name, x in sides.items():
        for ours, plain in zip(found.ranges[name], (x.amin(1), x.amax(1)), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    value = sides["value"]
    torch.testing.assert_close(found.channel_gaps["value"], value.amax(1) - value.amin(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.token_gaps["value"], value.amax(-1) - value.amin(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.key_norms, sides["key"].abs().sum(-1), rtol=1e-4, atol=1e-3)
    gaps = sides["key"].amax(1) - sides["key"].amin(1)
    priority = (sides["key"].amax((1, 2)) - sides["key"].amin((1, 2))) * gaps.std(-1)
    torch.testing.assert_close(found.priorities["key"].float(), priority, rtol=1e-3, atol=1e-3)


def test_mass_is_the_mean_weight_of_the_queries_that_see_a_token(seen):
    layers, call = seen
    keys = call.keys[0].repeat_interleave(2, 0)
    s = call.query[0] @ keys.mT * call.scores.scale
    weights = s.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1)
    plain = weights.sum(1).view(2, 2, TOKENS).mean(1) / torch.arange(TOKENS, 0, -1)
    torch.testing.assert_close(layers[1].mass, plain, rtol=1e-3, atol=1e-5)


def test_softcap_and_learned_sinks_count():
    torch.manual_seed(0)
    query, keys = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    plain = Call(0, query, keys, keys, Scores(1.0), query)
    assert inspection.attention_mass(plain).sum() == pytest.approx(3, rel=1e-5)
    sunk = plain._replace(scores=Scores(1.0, 0.0, 0, torch.zeros(2)))
    assert inspection.attention_mass(sunk).sum() < 3
    capped = plain._replace(scores=Scores(1.0, 1e-3))
    wanted = torch.tensor([[1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]])
    torch.testing.assert_close(inspection.attention_mass(capped), wanted, rtol=1e-2, atol=1e-2)


def test_the_pool_holds_the_smallest_keys_and_the_bits_are_those_of_the_cache(seen):
    layers, _ = seen
    model = patch(tiny_llama(initializer_range=0.3), method="turbo", bits="mixed", sink_num=2, sink_window=0)
    *_, last = feed(model, random_ids(1, TOKENS), cuts(TOKENS, 40))
    rows = report(last.cache).to_dict()["layers"]
    packed = TOKENS // 64 * 64
    first = layers[0]  # whose inputs in the patched model are full precision's too
    for head in range(2):
        norms = first.key_norms[head, :packed]
        # the pool compares tokens in INT8, whose codes are off by half a 119th of a token's largest number at most
        assert len(first.held[head]) == 2 and norms[first.held[head]].max() < norms.sort().values[1] * (1 + 3 / 119)
    assert first.bits == {"key": rows[0]["bits_per_head"]["k"][0], "value": rows[0]["bits_per_head"]["v"][0]}
    assert sorted(first.bits["key"]) == [2, 4]


def test_short_rows_and_several_rows_are_refused():
    recipe = find_recipes(["turbo"])["turbo"]
    with pytest.raises(QAttnError, match="packed nothing of 40 tokens"):
        inspect(tiny_llama(), recipe, random_ids(1, 40))
    with pytest.raises(QAttnError, match="2 rows"):
        inspect(tiny_llama(), recipe, random_ids(2, 100))


def test_every_head_has_a_plot_at_most_eight_a_row_with_labels():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    layer = Inspected(0, {name: (-torch.rand(n, 4), torch.rand(n, 4)) for name, n in (("query", 20), ("key", 10))})
    plots = [axes for axes in channel_ranges(layer, "a layer").axes if axes.axison]
    assert [axes.get_title() for axes in plots] == [f"query, head {i}" for i in range(20)] + [
        f"key, head {i}" for i in range(10)
    ]
    assert {axes.get_xlabel() for axes in plots} == {"channel"}
    assert max(axes.get_subplotspec().colspan.stop for axes in plots) == 8
    first = [axes for axes in plots if axes.get_subplotspec().is_first_col()]
    assert len(first) == 5 and all("minimum to maximum" in axes.get_ylabel() for axes in first)


@pytest.mark.slow
@pytest.mark.parametrize("picture", [heads, value_gaps])
def test_labels_of_many_layers_and_heads_do_not_overlap(picture):
    """Labels of layers, of heads and of bits do not overlap in the drawing."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    layers, count = [], 8
    for i in range(32):
        gaps = {side: torch.rand(count, 8) for side in ("key", "value")}
        bits = {side: [4, 2] * (count // 2) for side in gaps}
        priorities = {side: torch.rand(count) for side in gaps}
        layers.append(Inspected(100 + i, channel_gaps=gaps, token_gaps=gaps, priorities=priorities, bits=bits))
    figure = picture(layers, "a title")
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes[: 2 if picture is heads else 4]:
        texts = [axes.get_xticklabels(), axes.get_yticklabels(), list(axes.texts)]
        for labels in texts[:: 1 if picture is heads else 2]:  # the second axis of gaps has separate numbers
            boxes = [label.get_window_extent() for label in labels]
            assert sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]) == 0


@pytest.mark.slow
def test_the_command_draws_every_picture(tmp_path, qattn):
    numbers = tmp_path / "numbers.json"
    sizes = ("--tokens", "150", "--layer", "2", "--device", "cpu")
    arguments = ("inspect", "--pictures", str(tmp_path / "pictures"), *sizes)
    code, _, err = qattn(*arguments, "--output", str(numbers))
    assert code == 0, err
    files = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert files == ["channels-2.png", "gaps.png", "heads.png", "sinks-2.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "pictures").iterdir())
    layers = json.loads(numbers.read_text())["layers"]
    assert len(layers) == 8 and len(layers[0]["most_attended"][0]) == 10
    assert "packed layers are 0-7" in qattn(*arguments, "--layer", "8")[2]
