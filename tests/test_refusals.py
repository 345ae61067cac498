"""What cannot be done is refused: one clear message of our own, and everything is as it was."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel

from qattn_hf import QAttnCache, list_methods, load_recipe, patch, release, report, unpatch
from qattn_hf.errors import CapacityError, QAttnError, RecipeError, UnsupportedError

# fmt: off
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
}
# fmt: on
GQA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = 70
IDS = torch.randint(1, 101, (2, TOKENS), generator=torch.Generator().manual_seed(0))
ONE, LONGER = IDS[:1], torch.cat([IDS, IDS[:, :2]], 1)
GREEDY = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tiny(family: str = "llama", kind: Any = AutoModelForCausalLM, **sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, **(GQA | sizes if family == "llama" else sizes)}
    return kind.from_config(AutoConfig.for_model(family, **sizes)).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(ONE, **({"decoder_input_ids": ONE} if model.config.is_encoder_decoder else {})).logits


def traces(model: PreTrainedModel) -> list[Any]:
    """What a patch would leave behind."""
    return [model.config._attn_implementation, *((set(vars(m)), len(m._forward_pre_hooks)) for m in model.modules())]


def state(cache: QAttnCache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, (tensor, _) in cache.state_tensors().items()}


def same(before: dict[str, torch.Tensor], cache: QAttnCache) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in state(cache).items())


def refused(call: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    """`call` raises `error`, in one line with all `parts`."""
    with pytest.raises(error) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)


def refused_patch(model: PreTrainedModel, error: type[Exception], *parts: str, **how: Any) -> None:
    """`patch(model, **how)` raises, and the model is the stock model it was."""
    want, before = logits(model), traces(model)
    refused(lambda: patch(model, **how), error, *parts)
    assert traces(model) == before
    assert torch.equal(logits(model), want)


@pytest.fixture
def stock() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def patched() -> PreTrainedModel:
    return patch(tiny(), "turbo")


MIXED = {"bits": "mixed"}
FIRST = "defaults of turbo for llama, unmeasured"  # the recipe of `patched`
SETTINGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"method": "turb"}, ("unknown method 'turb'", "did you mean 'turbo'?", *list_methods())),
    ({"recipe": "trubo"}, ("unknown recipe 'trubo'", "did you mean 'turbo'?")),
    ({"k_bit": 4}, ("unknown key 'k_bit'", "did you mean 'k_bits'?")),
    ({"method": "int8", "bits": 4}, ("int8", "unknown key 'bits'", "softmax")),
    ({"bits": 3}, ("bits = 3", "4, 2 or 'mixed'")),
    ({"bits": "4"}, ("bits = '4'", "4, 2 or 'mixed'")),
    ({"bits": True}, ("bits = True", "4, 2 or 'mixed'")),
    ({"k_low_heads": [["0"], [1]], **MIXED}, ("k_low_heads", "'0'", "integer")),
    ({"block_kv": 48}, ("block_kv = 48", "32, 64 or 128")),
    ({"sas_threshold": 0.0}, ("sas_threshold = 0.0", "less than 0")),
    ({"n_h": 3, **MIXED}, ("n_h = 3", "2 KV heads")),
    ({"scope": "joint", **MIXED}, ("scope='joint'", "k_low_heads and v_low_heads")),
    ({"n_h": 1}, ("n_h", "bits='mixed'")),
    ({"n_h": 1, "k_low_heads": [[0], [0]], **MIXED}, ("n_h clashes with k_low_heads",)),
    ({"buffer_size": 96}, ("buffer_size=96", "multiple of block_kv=64")),
    ({"k_low_heads": [[0], [1]]}, ("k_low_heads needs k_bits='mixed'", "4")),
    ({"k_low_heads": [[0]], **MIXED}, ("k_low_heads has 1 layers", "the model has 2")),
    ({"v_low_heads": [[0], [1, 1]], **MIXED}, ("v_low_heads, layer 1 = [1, 1]", "0 to 1, each once")),
    ({"k_low_heads": [[0], [2]], **MIXED}, ("k_low_heads, layer 1 = [2]", "0 to 1")),
    ({"compute": "int8", "decode_compute": "model"}, ("compute='int8'", "decode_compute='model'", "or the two apart")),
    ({"impl": "triton"}, ("impl = 'triton'", "use impl='auto' or 'reference'")),
    ({"decode": "cuda"}, ("decode = 'cuda'", "'auto', 'graph', 'compile' or 'eager'")),
    ({"method": "int8", "recipe": "turbo"}, ("method='int8' clashes", "'turbo'", "give one of them")),
    ({"bits": 3, "crop_horizon": 1, "sofmax": "sas"}, ("bits = 3", "crop_horizon = 1", "did you mean 'softmax'?")),
    ({"method": "int_flash", "mode": "half", "v_granularity": "tensor"}, ("v_granularity='tensor'", "mode='half'")),
    ({"method": 3}, ("method", "3")),
    ({"method": ""}, ("unknown method ''",)),
    ({"recipe": 3}, ("recipe", "3")),
]


@pytest.mark.parametrize(("how", "parts"), SETTINGS, ids=lambda x: str(x)[:50] if isinstance(x, dict) else "")
def test_settings(stock, patched, how, parts):
    refused_patch(stock, RecipeError, *parts, **how)
    refused(lambda: QAttnCache.for_model(stock, **how), RecipeError, *parts)
    refused(lambda: patch(patched, **how), RecipeError)
    assert report(patched).to_dict()["recipe_origin"] == FIRST, "the first patch is gone"


FILES: dict[str, tuple[str, ...]] = {
    "bits: '4'\nmethod: turbo": ("bits = '4'", "4, 2 or 'mixed'"),
    "method: turbo\nbit: 4": ("unknown key 'bit'", "did you mean 'bits'?"),
    "method: turb": ("unknown method 'turb'", "did you mean 'turbo'?"),
    "bits: 4": ("key `method`", "turbo"),
    "- method": ("must be a mapping", "turbo"),
    "": ("must be a mapping", "turbo"),
    "method: [": ("is not YAML", "line 1"),
    "method: turbo\n1: 2": ("1",),
    "\udcff": ("is not YAML",),
}


@pytest.mark.parametrize(("text", "parts"), FILES.items())
def test_files(stock, tmp_path, text, parts):
    """Every message names the file."""
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused_patch(stock, RecipeError, str(path), *parts, recipe=path)
    refused(lambda: load_recipe(str(path)), RecipeError, str(path), *parts)


def test_other_files(stock, tmp_path):
    path = tmp_path / "mine.yaml"
    refused_patch(stock, RecipeError, "no recipe at", str(path), *list_methods(), recipe=path)
    path.write_text("method: none")
    refused_patch(stock, RecipeError, "'turbo' clashes", str(path), "'none'", method="turbo", recipe=path)


def test_graph_where_there_can_be_none(stock, patched):
    parts = "decode='graph'", "the model is on the cpu", "decode='auto'"
    refused_patch(stock, UnsupportedError, *parts, decode="graph")
    refused(lambda: patch(patched, decode="graph"), UnsupportedError, *parts)
    assert report(patched).to_dict()["recipe_origin"] == FIRST, "the first patch is gone"


OLD, MLA, BOTH = ("attention interface", "use a stock cache"), ("MLA", "stock cache"), ("encoder-decoder", "stock")
WINDOW = ("sliding_attention", "config.sliding_window=None")
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 32}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}, OLD),
    "gpt_neo": ({"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}, OLD),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, OLD),
    "deepseek_v3": (SIZES | LATENT | EXPERTS, MLA),
    "mistral": ({**GQA, "sliding_window": 32}, ("layers [0, 1]", *WINDOW)),
    "qwen2": ({**GQA, **SLIDING, "max_window_layers": 1}, ("layers [1]", *WINDOW)),
    "t5": ({"d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2}, BOTH),
    "bart": ({"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}, BOTH),
}
TOUCHES_KEYS: dict[str, dict[str, Any]] = {
    "diffllama": GQA,
    "doge": GQA,
    "jetmoe": {**GQA, "kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", MODELS)
def test_models(family):
    sizes, parts = MODELS[family]
    model = tiny(family, AutoModelForSeq2SeqLM if "encoder-decoder" in parts else AutoModelForCausalLM, **sizes)
    refused_patch(model, UnsupportedError, family, *parts)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, "gpt2", DynamicCache()], ids=lambda x: type(x).__name__)
def test_what_is_no_model(thing):
    refused(lambda: patch(thing), UnsupportedError, "a transformers model", type(thing).__name__)
    refused(lambda: unpatch(thing), QAttnError, "not patched")
    refused(lambda: report(thing), QAttnError, "patched model", type(thing).__name__)


def test_report_and_unpatch_of_a_stock_model(stock):
    refused(lambda: unpatch(stock), QAttnError, "not patched")
    refused(lambda: release(stock), QAttnError, "not patched")
    refused(lambda: report(stock), QAttnError, "patched model or a QAttnCache", "LlamaForCausalLM")


@pytest.mark.parametrize("name", ["forward", "_prepare_cache_for_generation", "get_compiled_call"])
def test_model_patched_by_other_means(stock, name):
    owner = stock.model.layers[1].self_attn if name == "forward" else stock
    setattr(owner, name, getattr(owner, name))
    refused_patch(stock, UnsupportedError, "already patched by other means", name, "undo that")
    delattr(owner, name)
    assert patch(stock) is stock


def test_patched_model_patched_by_other_means(patched):
    owner = patched.model.layers[1].self_attn
    owner.forward = owner.forward
    refused_patch(patched, UnsupportedError, "already patched by other means", "layers.1.self_attn.forward")


@pytest.mark.parametrize("count", [1, TOKENS])
@pytest.mark.parametrize("family", TOUCHES_KEYS)
def test_models_that_touch_keys_fail_closed(family, count):
    model = tiny(family, **TOUCHES_KEYS[family])
    want = logits(model)
    patch(model)
    refused(lambda: model(ONE[:, :count]), UnsupportedError, "packed")
    refused(lambda: model.generate(ONE[:, :count], **GREEDY), UnsupportedError, "packed")
    assert report(model).to_dict()["packed_tokens"] == report(model).to_dict()["open_tokens"] == 0
    assert torch.equal(logits(unpatch(model)), want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_our_cache_on_an_unpatched_model(attn):
    model = tiny(attn_implementation=attn)
    want, cache = logits(model), QAttnCache.for_model(model, "turbo")
    refused(lambda: model(ONE, past_key_values=cache), UnsupportedError, "qattn_hf.patch")
    refused(lambda: model.generate(ONE, past_key_values=cache, **GREEDY), UnsupportedError, "qattn_hf.patch")
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(logits(model), want)


def ones(count: int, *zeros: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.long).index_fill(1, torch.tensor(zeros, dtype=torch.long), 0)


RESTART = torch.cat([torch.arange(40), torch.arange(TOKENS - 40)])[None]
CAUSAL = torch.ones(1, 1, TOKENS, TOKENS).tril()
OWN = ("DynamicCache", "QAttnCache.for_model(model)")
ATTENTIONS = ("output_attentions", "unpatch(model)")
NO_CACHE = ("use_cache=True", "unpatch(model)")
FORWARD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"past_key_values": DynamicCache()}, OWN),
    ({"past_key_values": ()}, ("tuple", OWN[1])),
    ({"output_attentions": True}, ATTENTIONS),
    ({"use_cache": False}, NO_CACHE),
    ({"attention_mask": ones(TOKENS, 9)}, ("row 0", "zeros between real tokens", "on the left")),
    ({"attention_mask": CAUSAL.bool()}, ("mask of one's own", "2-D attention_mask")),
    ({"attention_mask": CAUSAL[0]}, ("mask", "2-D attention_mask")),
    ({"attention_mask": ones(TOKENS - 1)}, (f"{TOKENS - 1} columns", f"must have {TOKENS}")),
    ({"attention_mask": ones(TOKENS + 1)}, (f"{TOKENS + 1} columns", f"must have {TOKENS}")),
    ({"position_ids": RESTART}, ("packed sequences", "one row a sequence")),
    ({"is_causal": False}, ("causal", "not supported")),
    ({"cu_seq_lens_q": torch.tensor([0, 40, TOKENS])}, ("packed sequences", "not supported")),
]
GENERATE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"past_key_values": DynamicCache()}, OWN),
    ({"cache_implementation": "static"}, ("cache_implementation='static'", "leave it out", "unpatch(model)")),
    ({"output_attentions": True, "return_dict_in_generate": True}, ATTENTIONS),
    ({"use_cache": False}, NO_CACHE),
    ({"attention_mask": ones(TOKENS, 9)}, ("row 0", "zeros between real tokens", "on the left")),
    ({"attention_mask": ones(TOKENS, TOKENS - 1)}, ("on the left",)),
]


def named(x: Any) -> str:
    return "-".join(f"{k}={getattr(v, 'shape', v)}" for k, v in x.items()) if isinstance(x, dict) else ""


@pytest.mark.parametrize(("how", "parts"), FORWARD, ids=named)
def test_forward(patched, how, parts):
    want, foreign = logits(patched), copy.deepcopy(how.get("past_key_values"))
    if foreign is not None:
        how = {**how, "past_key_values": foreign}
    refused(lambda: patched(ONE, **how), UnsupportedError, *parts)
    if isinstance(foreign, DynamicCache):
        assert foreign.get_seq_length() == 0
    assert torch.equal(logits(patched), want)


@pytest.mark.parametrize(("how", "parts"), GENERATE, ids=named)
def test_generate(patched, how, parts):
    want = patched.generate(ONE, **GREEDY)
    refused(lambda: patched.generate(ONE, **how, **GREEDY), UnsupportedError, *parts)
    assert torch.equal(patched.generate(ONE, **GREEDY), want)


def test_mask_of_four_dimensions_in_generate(patched):
    """Here transformers itself is first, in some versions."""
    with pytest.raises(ValueError, match=r"2D|2-D"):
        patched.generate(ONE, attention_mask=CAUSAL.bool(), **GREEDY)


@pytest.mark.parametrize("sizes", [{"output_attentions": True}, {"use_cache": False}])
def test_config_that_asks_for_it(sizes):
    model, parts = tiny(attn_implementation="eager", **sizes), (*sizes, "unpatch(model)")
    want = logits(model)
    patch(model)
    refused(lambda: model(ONE), UnsupportedError, *parts)
    refused(lambda: model.generate(ONE, **GREEDY), UnsupportedError, *parts)
    assert torch.equal(logits(unpatch(model)), want)


@pytest.mark.parametrize("whole", [True, False])
def test_training(patched, whole):
    want = logits(patched)
    (patched if whole else patched.get_decoder()).train()
    refused(lambda: patched(ONE), UnsupportedError, "does not train", "model.eval()", "unpatch(model)")
    patched.eval()
    assert torch.equal(logits(patched), want)


def test_overflow_of_a_fixed_capacity(patched):
    cache = QAttnCache.for_model(patched, max_cache_len=TOKENS)
    spare = cache.layers[0].capacity - TOKENS
    patched(ONE, past_key_values=cache)
    before = state(cache)
    parts = "nothing was written", "max_cache_len"
    refused(lambda: patched(ONE[:, : spare + 1], past_key_values=cache), CapacityError, *parts)
    assert same(before, cache)
    grows = patched(ONE).past_key_values
    got, want = (patched(ONE[:, :spare], past_key_values=c).logits for c in (cache, grows))
    assert torch.equal(got, want)
    refused(lambda: patched(ONE[:, :1], past_key_values=cache), CapacityError, "nothing was written")


def test_overflow_at_once(patched):
    cache = QAttnCache.for_model(patched, max_cache_len=64)
    refused(lambda: patched(ONE, past_key_values=cache), CapacityError, "holds 64 tokens", "nothing was")
    for count in (TOKENS, 63):  # a prompt that does not fit, and one that leaves too little room
        call = functools.partial(patched.generate, ONE[:, :count], past_key_values=cache, **GREEDY)
        refused(call, CapacityError, "holds 64 tokens", "nothing was")
        assert int(cache.get_seq_length()) == 0
    fits = ONE[:, :62]  # the last answer token is never written
    assert torch.equal(patched.generate(fits, past_key_values=cache, **GREEDY), patched.generate(fits, **GREEDY))


@pytest.mark.parametrize("length", [0, -1, "70"])
def test_lengths_that_are_none(patched, length):
    refused(lambda: QAttnCache.for_model(patched, max_cache_len=length), QAttnError, "max_cache_len", str(length))


# fmt: off
BAD_TURNS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], tuple[str, ...]]] = {
    "batch": (lambda m, c: m(IDS[:, :2], **c), ("1 rows", "the call has 2", "batch_repeat_interleave")),
    "batch in generate": (lambda m, c: m.generate(LONGER, **c, **GREEDY), ("1 rows", "the call has 2")),
    "mask without the past": (
        lambda m, c: m(ONE[:, :2], attention_mask=ones(2), **c),
        (f"has seen {TOKENS} and 2 come now", f"must have {TOKENS + 2}"),
    ),
    "hole": (lambda m, c: m(ONE[:, :2], attention_mask=ones(TOKENS + 2, TOKENS), **c), ("zeros between", "the left")),
    "own mask": (lambda m, c: m(ONE[:, :1], attention_mask=CAUSAL[:, :, -1:].bool(), **c), ("mask of one's own",)),
    "output_attentions": (lambda m, c: m(ONE[:, :1], output_attentions=True, **c), ATTENTIONS),
    "stock attention": (lambda m, c: tiny()(ONE[:, :1], **c), ("qattn_hf.patch",)),
}
# fmt: on


@pytest.mark.parametrize("turn", BAD_TURNS)
def test_refused_turn_leaves_the_cache(patched, turn):
    cache, twin = (patched(ONE).past_key_values for _ in range(2))
    before, (call, parts) = state(cache), BAD_TURNS[turn]
    refused(lambda: call(patched, {"past_key_values": cache}), UnsupportedError, *parts)
    assert same(before, cache)
    got, want = (patched(ONE[:, :5], past_key_values=c).logits for c in (cache, twin))
    assert torch.equal(got, want)


def test_another_device_type(patched):
    cache = QAttnCache.for_model(patched)
    for layer in cache.layers:
        layer.device_type = "cuda"
    parts = "patched for cuda", "runs on cpu", "patch it again"
    refused(lambda: patched(ONE, past_key_values=cache), UnsupportedError, *parts)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_cache_of_a_model_with_other_layers(patched, layers):
    cache = QAttnCache.for_model(tiny(num_hidden_layers=layers), "turbo")
    parts = f"{layers} layers", "QAttnCache.for_model(model)"
    refused(lambda: patched(ONE, past_key_values=cache), UnsupportedError, *parts)
    assert not cache.state_tensors()


def test_crop_into_padded_columns(patched):
    cache = patched(IDS, attention_mask=torch.cat([ones(TOKENS, 0, 1), ones(TOKENS)])).past_key_values
    for _ in range(3):
        patched(IDS[:, :1], past_key_values=cache)
    before, most = state(cache), TOKENS + 1
    refused(lambda: cache.crop(-most - 1), UnsupportedError, f"cannot crop {most + 1} columns", "padding", "Crop less")
    assert same(before, cache)
    cache.crop(-most)
    assert int(cache.get_seq_length()) == 2
