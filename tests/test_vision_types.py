"""Types of vision models with an image in the prompt: the stock model's tokens, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_configs import shrunk
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from qattn_hf import patch, report, unpatch
from qattn_hf.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")

IMAGE, SIDE = 100, 28  # the token of an image part, and the image's pixels
STEPS = {"max_new_tokens": 66, "min_new_tokens": 66, "do_sample": False}  # past a block of 64
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
SMALL = {"image_size": SIDE, "patch_size": 14}
QWEN = {"image_token_id": IMAGE, "video_token_id": IMAGE - 1}
# changes of the config, of its vision and text configs, and the tokens of an image
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "qwen2_vl": (QWEN, {"embed_dim": 64, "hidden_size": 64}, MROPE, 4),
    "qwen2_5_vl": (QWEN, {"out_hidden_size": 64}, MROPE, 4),
    "qwen3_vl": (QWEN, {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}, MROPE, 4),
    "internvl": ({"image_token_id": IMAGE}, {"image_size": (SIDE, SIDE), "patch_size": (14, 14)}, {}, 1),
    "mistral3": (
        {"image_token_index": IMAGE, "spatial_merge_size": 1, "vision_feature_layer": -1},
        SMALL,
        {"sliding_window": None},
        4,
    ),
    "idefics3": ({"image_token_id": IMAGE, "scale_factor": 2}, SMALL, {}, 1),
    "smolvlm": ({"image_token_id": IMAGE, "scale_factor": 2}, SMALL, {}, 1),
    "gemma3": ({"image_token_index": IMAGE, "mm_tokens_per_image": 4}, SMALL, {}, 4),
    "paligemma": ({"image_token_index": IMAGE, "projection_dim": 64}, {**SMALL, "projection_dim": 64}, {}, 4),
}
FIRST = "qwen2_5_vl"
BOTH_WAYS = ["gemma3", "paligemma"]  # an image's tokens, and a whole prompt, see each other


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A random model in fp32, the same at every call; `changes` are of the config of its text."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    whole, vision, text, _ = TYPES[family]
    settings = shrunk(CONFIG_MAPPING[family]()).to_dict() | whole
    settings["vision_config"] |= vision
    settings["text_config"] |= text | changes
    config = CONFIG_MAPPING[family].from_dict(settings)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def prompt(family: str, tokens: int = 40) -> dict[str, torch.Tensor]:
    """Two rows with an image each, the second with padding on its left."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (2, tokens), generator=g)
    ids[:, 15 : 15 + TYPES[family][3]] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :7], ids[1, :7] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    images = torch.randn(2, 3, SIDE, SIDE, generator=g)
    if family.startswith("qwen"):  # patches of one frame said twice, in rows
        size = 16 if family == "qwen3_vl" else 14
        patches, grid = torch.randn(2 * 16, 3 * 2 * size * size, generator=g), torch.tensor([[1, 4, 4]] * 2)
        return {**inputs, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    if family in BOTH_WAYS:
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if family == "mistral3":
        inputs["image_sizes"] = torch.tensor([[SIDE, SIDE]] * 2)
    return {**inputs, "pixel_values": images[:, None] if family in ("idefics3", "smolvlm") else images}


def two_turns(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens of an answer about the image, more text, and an answer to that from the same cache."""
    first = model.generate(**inputs, **STEPS, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, torch.full((2, 5), 7)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 40), value=1)
    return model.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=8)


@pytest.mark.parametrize(
    "family",
    [pytest.param(t, marks=() if t == FIRST else pytest.mark.slow) for t in TYPES if t not in BOTH_WAYS],
)
def test_two_turns_about_an_image_are_the_stock_models(family: str):
    model, inputs = tiny(family), prompt(family)
    want = two_turns(model, inputs)
    other = model.generate(**{**inputs, "pixel_values": -inputs["pixel_values"]}, **STEPS)
    assert not torch.equal(other, want[:, : other.shape[1]]), "the image is seen"
    assert torch.equal(two_turns(patch(model, "none", impl="reference", family=False), inputs), want)
    assert report(model).to_dict()["packed_tokens"] > 64
    patch(model, "int8", impl="reference", family=False).generate(**inputs, **STEPS)
    assert report(model).to_dict()["packed_tokens"] > 64
    assert torch.equal(two_turns(unpatch(model), inputs), want)


def test_images_whose_tokens_see_each_other_are_refused_and_never_read_as_causal():
    model, inputs = tiny("gemma3"), prompt("gemma3")
    want = model.generate(**inputs, **STEPS)
    patch(model, "none", impl="reference", family=False)
    for call in (model, lambda **kwargs: model.generate(**kwargs, **STEPS)):
        with pytest.raises(UnsupportedError, match=r"images whose tokens attend to each other.*unpatch\(model\)"):
            call(**inputs)
    assert torch.equal(unpatch(model).generate(**inputs, **STEPS), want)


def test_a_prompt_that_is_read_in_both_directions_is_refused_by_patch():
    with pytest.raises(UnsupportedError, match="paligemma has attention that is not causal"):
        patch(tiny("paligemma"), "none")


@pytest.mark.slow
def test_text_without_an_image_runs_where_images_are_refused():
    model, ids = tiny("gemma3"), prompt("gemma3")["input_ids"].clamp(max=90)
    want = model.generate(ids, **STEPS)
    assert torch.equal(patch(model, "none", impl="reference", family=False).generate(ids, **STEPS), want)
