"""What `qattn compare` measures is what it says: of logits, of attention on the same inputs, of bits."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import random_ids, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import QAttnCache, QAttnError, patch
from qattn_hf.assets import demo_model_dir, prose
from qattn_hf.attention.observe import Call, observed
from qattn_hf.cache.sizes import size_of
from qattn_hf.fidelity.compare import ShadowCaches, compare
from qattn_hf.fidelity.picture import draw
from qattn_hf.fidelity.tables import table
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.metrics import AttentionSums, over_layers, pareto, text_figures, token_figures
from qattn_hf.reading.texts import full_logits, made_text, parted, read_as, rows_of
from qattn_hf.recipes.recipe import find_recipes

WORSE = {"cosine": -1, "relative_l1": 1, "rmse": 1}  # the sign of a worse figure


@pytest.fixture(scope="module")
def demo():
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(demo_model_dir())


@pytest.fixture(scope="module")
def rows(demo):
    """Three methods of the demo model, on two rows."""
    model, tokenizer = demo
    reading = read_as(rows_of(tokenizer, made_text(8000), 2, 200), steps=4, batch=1)
    recipes = find_recipes(["none", "turbo", "turbo:bits=2"])
    return {row["method"]: row for row in compare(model, recipes, reading, dtype=torch.bfloat16)}


def test_token_figures_are_the_plain_formulas():
    torch.manual_seed(0)
    full, packed = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    right = torch.tensor([[1, 0, 6], [2, 2, 5]])
    found = token_figures(full, packed, right)
    for b in range(2):
        for t in range(3):
            p, q = ([math.exp(x) for x in row[b, t].tolist()] for row in (full, packed))
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            y = right[b, t]
            wanted = {
                "kl": sum(x * math.log(x / z) for x, z in zip(p, q, strict=True)),
                "same_top1": float(p.index(max(p)) == q.index(max(q))),
                "change": q[y] - p[y],
                "nll_full": -math.log(p[y]),
                "nll": -math.log(q[y]),
            }
            assert {name: x[b, t].item() for name, x in found.items()} == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_a_forbidden_token_carries_no_divergence():
    full, packed = torch.tensor([[[0.0, -torch.inf, 1.0]]]), torch.tensor([[[0.0, -torch.inf, 1.0]]])
    assert token_figures(full, packed, torch.tensor([[0]]))["kl"].item() == 0


def test_text_figures_are_the_plain_formulas():
    one, two = torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.tensor([[1.5, 3.5], [2.0, 4.2]])
    found = text_figures({"kl": one, "same_top1": one * 0 + 1, "change": two, "nll_full": one, "nll": two})
    more = [0.5, 0.1]  # mean rise of a row
    assert found["kl"] == 2.5 and found["kl_se"] == pytest.approx(0.5)
    assert found["rms_change"] == pytest.approx(math.sqrt((1.5**2 + 3.5**2 + 2**2 + 4.2**2) / 4))
    assert found["ppl"] == pytest.approx(math.exp(2.8)) and found["ppl_full"] == pytest.approx(math.exp(2.5))
    assert found["ppl_change_pct"] == pytest.approx(100 * (math.exp(0.3) - 1))
    assert found["ppl_change_se_pct"] == pytest.approx(100 * abs(more[0] - more[1]) / 2)


def test_attention_figures_are_the_plain_formulas_over_all_that_was_added():
    torch.manual_seed(0)
    full, packed = torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8)
    sums = AttentionSums()
    for a, b in zip(full.split(2), packed.split(2), strict=True):
        sums.add(a, b)
    wanted = {
        "cosine": torch.nn.functional.cosine_similarity(full.flatten(), packed.flatten(), dim=0).item(),
        "relative_l1": ((full - packed).abs().sum() / full.abs().sum()).item(),
        "rmse": (full - packed).square().mean().sqrt().item(),
    }
    assert sums.figures() == pytest.approx(wanted, rel=1e-5)


def test_the_worst_layer_has_the_smallest_cosine_and_the_largest_errors():
    layers = [{"cosine": 0.9, "rmse": 2.0}, {"cosine": 0.7, "rmse": 1.0}]
    found = over_layers(layers)
    assert found["worst"] == {"cosine": 0.7, "rmse": 2.0}
    assert found["average"] == pytest.approx({"cosine": 0.8, "rmse": 1.5})


def test_the_front_holds_what_nothing_beats():
    points = [(4.0, 1.0), (3.0, 2.0), (3.0, 5.0), (5.0, 1.0), (2.0, 9.0), (6.0, 0.5), (3.0, 2.0), (4.5, 1.5)]
    assert pareto(points) == [4, 1, 0, 5]
    assert pareto([]) == []


@pytest.mark.slow
def test_full_precision_in_the_packed_frame_loses_nothing(rows):
    """fp32 sums of 256 channels and some hundred tokens in another order: errors of 1e-6 relative at most."""
    found = rows["none"]
    assert abs(found["kl"]) < 1e-7 and found["same_top1"] == 1 and found["rms_change"] < 1e-5
    assert found["attention"]["worst"]["cosine"] > 1 - 1e-9
    assert found["attention"]["worst"]["relative_l1"] < 5e-6
    assert found["effective_bits"] == pytest.approx(16, abs=0.05)  # in the precision that was asked for


def test_two_bits_are_worse_than_four_in_every_figure(rows):
    four, two = rows["turbo"], rows["turbo:bits=2"]
    assert two["kl"] > four["kl"] > rows["none"]["kl"]
    assert two["same_top1"] < four["same_top1"] and two["rms_change"] > four["rms_change"]
    for a, b in zip(four["layers"], two["layers"], strict=True):
        assert all(sign * b[name] > sign * a[name] for name, sign in WORSE.items())
    assert two["effective_bits_total"] == pytest.approx(four["effective_bits_total"] - 2)
    assert all(row["pareto"] for row in rows.values())


def test_rows_without_errors_of_attention(rows, tmp_path):
    """As `tune` measures them: a table has dashes there, and a plot of them is refused."""
    without = [{"model": "demo", **{key: value for key, value in rows["turbo"].items() if key != "attention"}}]
    header, (line,) = table(without)
    assert [line[header.index(name)] for name in ("cosine", "relative\nL1", "RMSE")] == ["-"] * 3
    with pytest.raises(QAttnError, match="compare with by_layer=True"):
        draw(without, tmp_path / "plot.png", "")


def test_attention_is_judged_on_the_inputs_of_full_precision_and_changes_nothing(demo):
    """What the observer gets is what the model computes with, and the model goes on as if nobody looked."""
    model, _ = demo
    reading = read_as(random_ids(1, 200), steps=3)
    recipes = find_recipes(["turbo:bits=2"])
    plain = full_logits(model, reading.ids, reading)
    beside, outs = ShadowCaches(model, recipes, 0), []

    def both(call: Call) -> None:
        beside(call)
        outs.append(call)

    before = model.config._attn_implementation
    with observed(model, both):
        seen = full_logits(model, reading.ids, reading)
    assert model.config._attn_implementation == before
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    # the last layer's input is full precision's though the packed layers before it err: its cache got the same keys
    last = [call for call in outs if call.layer == model.config.num_hidden_layers - 1]
    ring = beside.caches["turbo:bits=2"].layers[-1]
    assert int(ring.state["length"]) == last[-1].keys.shape[2] == 200
    alone = QAttnCache.for_model(model, recipe=recipes["turbo:bits=2"]).layers[-1]
    again = torch.cat([call.packed_out(alone) for call in last], 1)
    wanted = AttentionSums()
    wanted.add(torch.cat([call.out for call in last], 1), again)
    assert beside.sums["turbo:bits=2"][last[0].layer].figures() == pytest.approx(wanted.figures(), rel=1e-9)


def test_an_observer_can_put_its_own_output_in_place():
    model, ids = tiny_llama(), random_ids(1, 20)
    plain = model(ids).logits
    with torch.inference_mode(), observed(model, lambda call: call.out * 0 if call.layer == 1 else None):
        other = model(ids).logits
    assert not torch.allclose(plain, other)
    torch.testing.assert_close(model(ids).logits, plain)


def test_what_is_observed_must_not_be_patched():
    with pytest.raises(QAttnError, match="unpatch"), observed(patch(tiny_llama(), method="int8"), lambda call: None):
        pass


def test_nothing_packed_is_an_error_that_leaves_the_model_alone():
    model = tiny_llama()
    with pytest.raises(QAttnError, match="turbo packed nothing of 40 tokens"):
        compare(model, find_recipes(["turbo"]), read_as(random_ids(1, 40)))
    assert not hasattr(model, "_qattn") and model.config._attn_implementation == "sdpa"


def test_bits_are_those_of_the_tensors_of_a_cache_of_that_length():
    model = patch(tiny_llama(), method="turbo", crop_horizon=32)
    cache = QAttnCache.for_model(model, max_cache_len=1024)
    for _ in feed(model, random_ids(1, 1024), [0, 1024], cache=cache):
        pass
    held = sum(tensor.nbytes for tensor, _ in cache.state_tensors().values())
    short = QAttnCache.for_model(model)
    for _ in feed(model, random_ids(1, 70), [0, 70], cache=short):
        pass
    size = size_of(short, 1024, torch.float32)
    assert size.kv_bytes == held and size.values == 2 * 2 * 2 * 16 * 1024
    assert size.effective_bits_total == 8 * held / size.values


def test_rows_come_from_all_over_the_text_and_do_not_overlap(demo):
    tokenizer = demo[1]
    text = made_text(3000)
    every = tokenizer(text, add_special_tokens=False).input_ids
    ids = rows_of(tokenizer, text, 3, 50)
    assert ids.shape == (3, 50) and set(ids[:, 0].tolist()) == {tokenizer.bos_token_id}
    starts = [0, len(every) // 3, len(every) // 3 * 2]
    assert starts[1] > 49 and ids[:, 1:].tolist() == [every[start : start + 49] for start in starts]
    with pytest.raises(QAttnError, match=r"has \d+ tokens; 2 rows of 50 need 98.*--rows"):
        rows_of(tokenizer, tokenizer.decode(every[:60]), 2, 50)


def test_a_made_text_has_prose_sums_and_lists():
    """Every paragraph comes once before one comes again, in another order with another seed."""
    paragraphs = prose.TEXT.split("\n\n")
    text = made_text(14000)
    places = [text.find(paragraph) for paragraph in paragraphs]
    assert min(places) >= 0 and len(text) >= 14000
    first_again = min(
        text.find(one, place + 1) for one, place in zip(paragraphs, places, strict=True) if text.count(one) > 1
    )
    assert max(places) < first_again
    assert text.count("Registry:") > 3 and text.count("####") > 3
    assert made_text(14000) == text != made_text(14000, seed=1)


def test_rows_are_parted_evenly():
    some, others = parted(torch.arange(7)[:, None], 3)
    assert some.flatten().tolist() == [0, 2, 4] and others.flatten().tolist() == [1, 3, 5, 6]


COMPARE = ("compare", "--device", "cpu")


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_rows_and_a_picture(qattn, tmp_path):
    small = ("--rows", "1", "--tokens", "150", "--steps", "2", "--dtype", "float32")
    files = ("--output", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.png"))
    code, out, _ = qattn(*COMPARE, "--method", "none,turbo:k_bits=4,v_bits=2", *small, *files)
    assert code == 0 and "turbo:k_bits=4,v_bits=2" in out and "Pareto" in out
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in written["rows"]] == ["none", "turbo:k_bits=4,v_bits=2"]
    assert written["rows"][1]["recipe"] == {"method": "turbo", "k_bits": 4, "v_bits": 2}
    assert written["versions"]["torch"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = qattn(*COMPARE, "--method", "int8", "--json", *small)
    row = json.loads(out)
    assert code == 0 and row["method"] == "int8" and row["kl_se"] is None and len(row["layers"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "nonesuch"), "unknown method 'nonesuch'"),
        (("--method", "sage2:cache=model"), "packs nothing"),
        (("--method", "turbo", "--tokens", "40", "--rows", "1"), "packed nothing of 40 tokens"),
        (("--dtype", "int8"), "'float32'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(qattn, arguments: tuple[str, ...], said: str):
    code, _, error = qattn(*COMPARE, *arguments)
    assert code in (1, 2) and said in error and len(error.strip().splitlines()) == 1
