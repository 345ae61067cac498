"""Offsets of positions after an image belong to a conversation: other prompts, files, other rows leave them right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids
from test_vision_types import IMAGE, prompt, tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.model._compat import VERSION

pytestmark = pytest.mark.usefixtures("no_grad")

FAMILIES = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"]
SIDE = 16  # patches of the image on a side: 64 tokens, after which positions are 56 nearer


def about_an_image(rows: int = 1, family: str = "qwen2_5_vl") -> dict[str, torch.Tensor]:
    """Make a prompt with a large image. The second row's image is smaller."""
    pixels = 16 if family == "qwen3_vl" else 14  # of a patch, on a side
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (rows, 120), generator=g)
    grids = [(SIDE, SIDE), (SIDE // 2, SIDE)][:rows]
    for row, (high, wide) in enumerate(grids):
        ids[row, 15 : 15 + high * wide // 4] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(sum(h * w for h, w in grids), 3 * 2 * pixels**2, generator=g),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
    }


def model_of(family: str) -> PreTrainedModel:
    return patch(tiny(family, max_position_embeddings=512), "none")


QUESTION = random_ids(1, 7, seed=5) % 90 + 3


def answer(model: PreTrainedModel, cache: Any, first: torch.Tensor) -> torch.Tensor:
    """Return the logits of the answer that `generate` gives to a question, after the tokens of the cache."""
    ids = torch.cat([first, QUESTION.expand(len(first), -1)], 1)
    given = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(ids, past_key_values=cache, **given).logits)


def step(model: PreTrainedModel, cache: Any, first: torch.Tensor) -> torch.Tensor:
    """Logits of a question by a call of the model alone."""
    return model(QUESTION.expand(len(first), -1), past_key_values=cache).logits


def disturb(model: PreTrainedModel, cache: Any, folder: Path) -> Any:
    """Another prompt, without an image."""
    model.generate(random_ids(1, 15), max_new_tokens=2, do_sample=False)
    return cache


def disturb_by_a_call(model: PreTrainedModel, cache: Any, folder: Path) -> Any:
    model(random_ids(1, 15))
    return cache


def from_a_file(model: PreTrainedModel, cache: Any, folder: Path) -> Any:
    cache.save(folder / "image")
    return QAttnCache.load(folder / "image", model=disturbed(model))


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """The model as after a start: it knows of no conversation."""
    for name in model._qattn.holders:
        model.get_submodule(name).rope_deltas = None
    return model


BETWEEN = {"another prompt": disturb, "a call": disturb_by_a_call, "a file": from_a_file}


@pytest.mark.product("qwen2_5_vl")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_where_it_was_after_another_prompt_and_from_a_file(family: str, tmp_path: Path):
    model, seen = model_of(family), about_an_image(1, family)
    first = model.generate(**seen, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    kept = first.past_key_values
    for ask in (answer, step):
        ids = first.sequences if ask is answer else first.sequences[:, :-1]
        want = ask(model, copy.deepcopy(kept), ids)
        for name, between in BETWEEN.items():
            got = ask(model, between(model, copy.deepcopy(kept), tmp_path), ids)
            assert torch.equal(got, want), name
    model = unpatch(model)
    stock = model.generate(**seen, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(stock.sequences, first.sequences)
    got = answer(model, stock.past_key_values, stock.sequences)
    assert torch.allclose(got, answer(patch(model, "none"), kept, stock.sequences), atol=1e-4)  # roundings


def test_a_conversation_of_text_is_without_the_offset_of_an_image_between(tmp_path: Path):
    model, text = model_of("qwen2_5_vl"), random_ids(1, 30) % 90 + 3
    for read in (lambda: model(text).past_key_values, lambda: generated(model, text)):
        want = step(model, read(), text)
        cache = read()
        model.generate(**about_an_image(), max_new_tokens=2, do_sample=False)
        assert torch.equal(step(model, cache, text), want)


def generated(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    out = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    return out.past_key_values


@pytest.mark.skipif(VERSION < (5, 23), reason="older transformers keep the first offset where a second image comes")
def test_a_second_image_gives_the_conversation_its_offset():
    model, seen = model_of("qwen2_5_vl"), about_an_image()
    cache = generated(model, random_ids(1, 10) % 90 + 3)
    first = random_ids(1, 10) % 90 + 3
    ids = torch.cat([first, seen["input_ids"]], 1)
    both = {**seen, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    model.generate(**both, past_key_values=cache, max_new_tokens=1, do_sample=False)
    whole = model.generate(**both, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    want = step(model, whole.past_key_values, ids)
    disturb(model, None, Path())
    assert torch.allclose(step(model, cache, ids), want, atol=1e-4)  # roundings of two calls in place of one


ROWS: dict[str, tuple[Callable[[QAttnCache], Any], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "select": (lambda cache: cache.batch_select_indices([1]), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("change", ROWS)
def test_offsets_are_those_of_the_rows(change: str, tmp_path: Path):
    model, seen = model_of("qwen2_5_vl"), about_an_image(2)
    cache = model(**seen).past_key_values
    assert len({int(x) for x in model.model.rope_deltas}) == 2
    want = step(model, copy.deepcopy(cache), seen["input_ids"])
    move, rows = ROWS[change]
    move(cache)
    for held in (cache, from_a_file(model, copy.deepcopy(cache), tmp_path)):
        got = step(model, held, seen["input_ids"][rows])
        assert torch.allclose(got, want[rows], atol=1e-5)  # roundings of another batch


@pytest.mark.skipif(VERSION < (5, 23), reason="older transformers fail on several answers to each of several images")
def test_two_answers_to_each_of_two_images_go_on():
    """transformers computes an offset a prompt; the cache has a row an answer."""
    model, seen = model_of("qwen2_5_vl"), about_an_image(2)
    torch.manual_seed(0)
    given = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    out = model.generate(**seen, **given)
    disturb(model, None, Path())
    got = step(model, out.past_key_values, out.sequences)
    ids = torch.cat([out.sequences[:, :-1], QUESTION.expand(4, -1)], 1)
    images = seen["pixel_values"].split(seen["image_grid_thw"].prod(1).tolist())
    fresh = model(
        ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == IMAGE).int(),
        pixel_values=torch.cat([images[i // 2] for i in range(4)]),
        image_grid_thw=seen["image_grid_thw"].repeat_interleave(2, 0),
    )  # fmt: skip
    assert torch.allclose(got, fresh.logits[:, -7:], atol=1e-4)  # roundings


def test_unpatch_takes_the_hooks_off():
    model = model_of("qwen2_5_vl")
    unpatch(model)
    assert "_prepare_position_ids_for_generation" not in vars(model) and not model._forward_hooks
    seen = prompt("qwen2_5_vl")
    assert model(**seen).logits.shape[0] == 2
