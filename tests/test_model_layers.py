"""Layers that are not packed, beside packed ones: windows, chunks, linear attention, SSM and convolutions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from refusals import GQA, refused
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qattn_hf import QAttnCache, patch, report, unpatch
from qattn_hf.check import check
from qattn_hf.errors import QAttnError, RecipeError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")

WINDOW = 20  # shorter than the prompt and than a block of 64
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
BOTH = {"num_hidden_layers": 2, "head_dim": 16}
GATED = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
KINDS = {"sliding": "sliding_attention", "full": "full_attention", "chunked": "chunked_attention"}
# what each type needs to be small, and which of its layers are packed
MODELS: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "mistral": ({"sliding_window": WINDOW}, [False, False]),
    "gemma2": ({**BOTH, "sliding_window": WINDOW}, [False, True]),
    "gemma3_text": (
        {**BOTH, "sliding_window": WINDOW, "layer_types": [KINDS["sliding"], KINDS["full"]]},
        [False, True],
    ),
    "gpt_oss": (
        {**BOTH, **EXPERTS, "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        [False, True],
    ),
    "llama4_text": (
        {
            **BOTH, **EXPERTS, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
            "layer_types": [KINDS["chunked"], KINDS["full"]],
        },
        [False, True],
    ),
    "qwen3_next": ({**BOTH, **GATED, "layer_types": ["linear_attention", KINDS["full"]]}, [False, True]),
    "granitemoehybrid": ({**MAMBA, **EXPERTS, "layer_types": ["mamba", "attention"]}, [False, True]),
    "falcon_h1": (
        {**BOTH, **MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1, "num_hidden_layers": 2},
        [True, True],
    ),
    "gemma4_text": (  # with other heads in its full layer
        {
            **BOTH, "sliding_window": WINDOW, "layer_types": [KINDS["sliding"], KINDS["full"]], "global_head_dim": 32,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101,
        },
        [False, True],
    ),
    "lfm2": ({"layer_types": ["conv", KINDS["full"]], "block_ff_dim": 48}, [False, True]),
}  # fmt: skip
WINDOWED = ["gemma2", "llama4_text"]
STATES = ["qwen3_next", "granitemoehybrid", "falcon_h1"]
GREEDY = {"max_new_tokens": 66, "do_sample": False}  # past the window, and past a block
SHORT = {**GREEDY, "max_new_tokens": 5}
IDS = torch.randint(1, 101, (2, 30), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**GQA, **MODELS.get(family, ({}, []))[0], **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):  # gpt-oss leaves them as memory was
            torch.nn.init.normal_(weight)
    return model


def patched(model: PreTrainedModel, method: str = "none", **settings: Any) -> PreTrainedModel:
    return patch(model, method, impl="reference", family=False, **settings)


def packed_layers(cache: QAttnCache) -> list[bool]:
    return [layer in cache.packed for layer in cache.layers]


@pytest.fixture(params=MODELS)
def family(request) -> str:
    if request.param not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {request.param}")
    return request.param


@pytest.mark.filterwarnings("ignore:nothing is packed")
def test_greedy_tokens_are_the_stock_models(family):
    model = tiny(family)
    want = model.generate(IDS, attention_mask=MASK, **GREEDY)
    logits = model(IDS).logits
    got = patched(model).generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(got.sequences, want)
    assert packed_layers(got.past_key_values) == MODELS[family][1]
    torch.testing.assert_close(model(IDS).logits, logits, rtol=0, atol=1e-5)  # fp32 sums in another order
    assert torch.equal(model.generate(IDS, attention_mask=MASK, prefill_chunk_size=7, **SHORT), want[:, :35])
    assert torch.equal(unpatch(model)(IDS).logits, logits)


@pytest.mark.filterwarnings("ignore:nothing is packed")
def test_rows_of_a_padded_batch_are_as_alone(family):
    model = patched(tiny(family), "int8")
    batch = model.generate(IDS, attention_mask=MASK, **SHORT)
    for i, row in enumerate(batch):
        alone = model.generate(IDS[i : i + 1, MASK[i] == 1], **SHORT)
        assert torch.equal(row[-5:], alone[0, -5:])


@pytest.mark.filterwarnings("ignore:nothing is packed")
def test_report_counts_every_layer(family):
    model = patched(tiny(family), "int8")
    cache = model.generate(IDS, return_dict_in_generate=True, **SHORT).past_key_values
    data = report(model).to_dict()
    assert data["kv_bytes"] == sum(t.nbytes for t, _ in cache.state_tensors().values())
    assert [row["kernels"] != "model" for row in data["layers"]] == MODELS[family][1]
    for row in data["layers"]:
        if "own" in row:
            assert row["bytes"] > 0 and row["packed_tokens"] == 0 and row["effective_bits_total"] == 32
    assert data["packed_tokens"] == (2 * 34 if any(MODELS[family][1]) else 0)
    if not all(MODELS[family][1]):
        text = str(report(model))
        assert "the model's own:" in text and "layers are not packed" in text
    assert data["decode"] == "eager" and "keep what is the model's own" in data["decode_reason"]


@pytest.mark.filterwarnings("ignore:nothing is packed")
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies_go_their_own_way(family, how):
    model = patched(tiny(family), "int8")
    cache = model(IDS).past_key_values
    want = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
    other = copy.deepcopy(cache) if how == "copied" else pickle.loads(pickle.dumps(cache))
    model(IDS[:, 3:9], past_key_values=cache)
    assert torch.equal(model(IDS[:, :3], past_key_values=other).logits, want)
    assert int(cache.get_seq_length()) == 36 and int(other.get_seq_length()) == 33


@pytest.mark.filterwarnings("ignore:nothing is packed")
def test_rows_are_selected_repeated_and_reordered(family):
    model = patched(tiny(family), "int8")

    def steps(cache: QAttnCache, rows: list[int]) -> torch.Tensor:
        return model(IDS[rows, :3], past_key_values=cache).logits

    cache = model(IDS).past_key_values
    want = steps(copy.deepcopy(cache), [0, 1])
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    close = {"rtol": 0, "atol": 1e-5}  # experts add up their tokens in the order of rows
    torch.testing.assert_close(steps(swapped, [1, 0]), want[[1, 0]], **close)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    torch.testing.assert_close(steps(cache, [1, 0]), want[[1, 0]], **close)
    for wrong in (lambda: cache.reorder_cache(torch.tensor([0, 2])), lambda: cache.batch_select_indices([5])):
        refused(wrong, QAttnError, "Nothing was changed")


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "lfm2"])
def test_beams_and_a_second_turn(family):
    model = tiny(family)
    beams = {**SHORT, "num_beams": 2}
    first = dict(attention_mask=MASK, return_dict_in_generate=True, **SHORT)
    want = model.generate(IDS, attention_mask=MASK, **beams)
    turn = model.generate(IDS, **first)
    longer, mask = torch.cat([turn.sequences, IDS[:, :7]], 1), torch.nn.functional.pad(MASK, (0, 12), value=1)
    want_second = model.generate(longer, attention_mask=mask, past_key_values=turn.past_key_values, **SHORT)
    patched(model)
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **beams), want)
    turn = model.generate(IDS, **first)
    got = model.generate(longer, attention_mask=mask, past_key_values=turn.past_key_values, **SHORT)
    assert torch.equal(got, want_second)


@pytest.mark.parametrize("family", WINDOWED)
def test_prompt_lookup_rolls_windows_back(family):
    model = tiny(family)
    prompt = IDS[:1].repeat(1, 2)
    want = model.generate(prompt, **GREEDY)
    got = patched(model).generate(prompt, prompt_lookup_num_tokens=4, **GREEDY)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", STATES)
def test_drafts_are_refused_where_a_state_cannot_go_back(family):
    model = patched(tiny(family))
    with pytest.raises(ValueError, match="assisted generation"):  # of most such types by transformers itself
        model.generate(IDS[:1], prompt_lookup_num_tokens=4, **SHORT)


@pytest.mark.parametrize("family", WINDOWED)
def test_crop(family):
    model = patched(tiny(family))
    cache = model(IDS[:, : WINDOW - 4]).past_key_values
    want = model(IDS[:, 16:24], past_key_values=copy.deepcopy(cache)).logits
    model(IDS[:, 20:23], past_key_values=cache)
    cache.crop(-3)  # the window is not full yet
    got = model(IDS[:, 16:24], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    refused(lambda: cache.crop(-3), UnsupportedError, "cannot crop 3", str(WINDOW), "fresh cache")
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {24}
    cache.crop(-24)
    assert int(cache.get_seq_length()) == 0
    torch.testing.assert_close(model(IDS[:, :16], past_key_values=cache).logits, model(IDS[:, :16]).logits)


@pytest.mark.parametrize("family", STATES)
def test_crop_of_states_is_refused_and_reset_empties_them(family):
    model = patched(tiny(family))
    cache = model(IDS).past_key_values
    want = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
    refused(lambda: cache.crop(-1), UnsupportedError, "cannot crop 1", "linear", "fresh cache")
    assert torch.equal(model(IDS[:, :3], past_key_values=cache).logits, want)
    cache.reset()
    torch.testing.assert_close(model(IDS, past_key_values=cache).logits, model(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("family", ["gemma2", *STATES])
def test_an_interrupted_call_has_never_been(family, tokens, error):
    """States that are the model's own are put back as packed layers are; `tokens` came before."""
    model = patched(tiny(family))
    cache, twin = (QAttnCache.for_model(model) for _ in range(2))
    for each in (cache, twin) if tokens else ():
        model(IDS, past_key_values=each)
    more = IDS[:, : tokens or 30]
    for layer in model.model.layers:
        hook = layer.register_forward_hook(lambda *args: (_ for _ in ()).throw(error()))
        with pytest.raises(error):
            model(more, past_key_values=cache)
        hook.remove()
    for ids in (more, IDS[:, :1], IDS[:, :40]):
        assert torch.equal(*(model(ids, past_key_values=each).logits for each in (cache, twin)))


def test_what_fails_before_any_layer_leaves_the_cache_whole():
    model = patched(tiny("gemma2"))
    cache = model(IDS).past_key_values
    want = model(IDS[:, :3], past_key_values=copy.deepcopy(cache)).logits
    with pytest.raises(IndexError):
        model(IDS[:, :3] + 500, past_key_values=cache)
    assert torch.equal(model(IDS[:, :3], past_key_values=cache).logits, want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_the_models_own_attention_stays(attn):
    model = tiny("gemma3_text", attn_implementation=attn)
    want = model.generate(IDS, attention_mask=MASK, **SHORT)
    assert torch.equal(patched(model).generate(IDS, attention_mask=MASK, **SHORT), want)
    assert torch.equal(patched(model, "int8").generate(IDS, attention_mask=MASK, **SHORT)[:, :31], want[:, :31])
    assert unpatch(model).config._attn_implementation == attn


def test_other_attention_is_refused():
    model = tiny("gemma2")
    model.config._attn_implementation_internal = "flex_attention"
    refused(lambda: patched(model), UnsupportedError, "flex_attention", "attn_implementation='sdpa'")
    assert not hasattr(model, "_qattn")


@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_steps_that_cannot_be_captured_are_refused(decode):
    refused(
        lambda: patched(tiny("gemma2"), decode=decode),
        UnsupportedError,
        decode,
        "1 layers keep what is the model's own",
    )


def test_settings_for_layers_that_are_not_packed():
    model = tiny("gemma2", num_hidden_layers=4)
    refused(
        lambda: patched(model, "turbo", layers={"0,2": {"bits": 2}}), RecipeError, "0,2", "not packed", "window of 20"
    )
    patched(model, "turbo", layers={"0-1": {"bits": 2}})


SHARED = {
    "num_hidden_layers": 6, "layer_types": [KINDS["sliding"], KINDS["full"]] * 3, "num_kv_shared_layers": 2,
    "sliding_window": WINDOW, "head_dim": 16, "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 8,
}  # fmt: skip
SHARING: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**SHARED, "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {**SHARED, "global_head_dim": 16, "num_global_key_value_heads": 2},
}


@pytest.mark.parametrize("family", SHARING)
def test_layers_that_share_keys_pack_them_for_themselves(family):
    """Also in a prompt, of which they may compute the last token alone."""
    model = tiny(family, **SHARING[family])
    want = model.generate(IDS, attention_mask=MASK, **GREEDY)
    cache = patched(model)(IDS).past_key_values
    assert packed_layers(cache) == [False, True, False, True, False, True]
    assert [row["bytes"] > 0 for row in report(cache).to_dict()["layers"]] == [True, True, True, True, False, True]
    assert torch.equal(model.generate(IDS, attention_mask=MASK, **GREEDY), want)


def test_over_stock_caches_is_refused():
    refused(lambda: patch(tiny("gemma2"), "sage2", cache="model"), UnsupportedError, "sliding_attention", "layers [0]")


@pytest.mark.parametrize("family", ["gemma2", "llama4_text", "lfm2", "granitemoehybrid"])
def test_check_predicts_the_bytes(family):
    model = tiny(family).to(torch.bfloat16)
    model.config.dtype = model.dtype
    found = check(model.config, "int8", device_type="cpu", at_tokens=64)
    cache = (
        patched(model, "int8")
        .generate(IDS[:1].repeat(1, 2), min_new_tokens=5, return_dict_in_generate=True, max_new_tokens=5)
        .past_key_values
    )
    counted = [row["bytes"] for row in report(cache).to_dict()["layers"]]
    assert found.refused is None and not found.uncounted
    own = [i for i, packed in enumerate(MODELS[family][1]) if not packed]
    assert [found.layers[i]["bytes"] for i in own] == [counted[i] for i in own]
