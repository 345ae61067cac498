"""Model families, shapes and dtypes, the ways of calling a model, and what `patch` leaves alone."""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import pytest
import torch
from helpers import error
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    TextIteratorStreamer,
    pipeline,
)

from qattn_hf import QAttnCache, QAttnError, list_methods, patch, report, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")

VOCAB, PROMPT, NEW, PAD = 101, 200, 5, 15
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,  # large enough for answers that are not one token over and over
}
GQA = {**SIZES, "num_key_value_heads": 2}
FULL = {"sliding_window": None}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GQA),
    "qwen2": Qwen2Config(**GQA),
    "qwen3": Qwen3Config(**GQA, head_dim=16),
    "mistral": MistralConfig(**GQA, **FULL),
    "phi3": Phi3Config(**GQA, **FULL),
    "gemma": GemmaConfig(**GQA, head_dim=16),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "opt": OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64, init_std=0.1),
    "gemma2": Gemma2Config(
        **GQA, head_dim=16, layer_types=["full_attention"] * 2, attn_logit_softcapping=2.0, query_pre_attn_scalar=1
    ),
}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
# Root mean square error of logits over that of the logits: below it nothing is packed, above it something is broken.
NOISE = {"int8": (5e-4, 0.05), "turbo": (3e-3, 0.2)}
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# In the first tier a ring of codes, one without, one with sinks, and no ring.
FEW = ("turbo", "kivi", "sinkq", "int8")
every_method = pytest.mark.parametrize(
    "method", [m if m in FEW else pytest.param(m, marks=pytest.mark.slow) for m in list_methods()]
)


def tiny(config: PretrainedConfig | None = None, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A random model, biases included; Llama with other `sizes` by default."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**GQA, **sizes}) if config is None else copy.deepcopy(config)
    kind = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"  # SDPA leaves cap and sinks out
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kind).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def tokens(rows: int = 1, count: int = PROMPT, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the first with `PAD` columns of padding on its left."""
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[0, :PAD] = ids[0, :PAD] = 0
    return ids, mask


def turns(model: PreTrainedModel, ids: torch.Tensor, first: int = PROMPT - 4) -> torch.Tensor:
    """Return the logits of a prompt and of later single steps, which read the prompt from the cache."""
    out = model(ids[:, :first], use_cache=True)
    logits = [out.logits]
    for step in range(first, ids.shape[1]):
        logits.append(model(ids[:, step : step + 1], past_key_values=out.past_key_values).logits)
    return torch.cat(logits, 1)


def check_noise(method: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """`none` computes what the stock cache does; the others are near it, and not it."""
    rounding = ROUNDING[got.dtype]
    if method == "none":
        assert error(got, want) < rounding
    else:
        low, high = NOISE.get(method, (1e-4, 0.5))
        assert low < error(got, want) < high + rounding


# Families, shapes, dtypes


@pytest.mark.parametrize("family", FAMILIES)
def test_none_is_the_stock_cache(family):
    model, (ids, mask) = tiny(FAMILIES[family]), padded()
    want, logits = model.generate(ids, attention_mask=mask, **GREEDY), model(ids, attention_mask=mask).logits
    steps = turns(model, ids[1:])
    patch(model, "none")
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), want)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask == 1], logits[mask == 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(turns(model, ids[1:]), steps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [m for m in list_methods() if m != "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_every_layer_with_small_noise(family, method):
    model, ids = tiny(FAMILIES[family]), tokens()
    want = turns(model, ids)
    patch(model, method)
    got = turns(model, ids)
    check_noise(method, got[:, PROMPT - 4 :], want[:, PROMPT - 4 :])
    assert all(layer["packed_tokens"] >= 64 for layer in report(model).to_dict()["layers"])


@pytest.mark.product
@pytest.mark.parametrize("method", list_methods())
@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 128, 256])
def test_head_dims(head_dim, method):
    model, ids = tiny(head_dim=head_dim, num_attention_heads=2, num_key_value_heads=1), tokens()
    want = turns(model, ids)
    check_noise(method, turns(patch(model, method), ids), want)


@pytest.mark.product
@pytest.mark.parametrize("method", list_methods())
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_groups_of_query_heads(kv_heads, method):
    model, ids = tiny(num_attention_heads=8, num_key_value_heads=kv_heads), tokens()
    want = turns(model, ids)
    check_noise(method, turns(patch(model, method), ids), want)


@pytest.mark.product("torch.bfloat16-turbo")
@pytest.mark.parametrize("method", list_methods())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, method):
    model, ids = tiny().to(dtype), tokens()
    want = turns(model, ids)
    got = turns(patch(model, method), ids)
    assert got.dtype == dtype
    check_noise(method, got, want)
    assert model.generate(ids, **GREEDY).shape == (1, PROMPT + NEW)


# Ways of calling


def test_pipeline_of_a_batch_equals_generate():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side="left")
    texts = [" ".join(f"w{int(i)}" for i in row) for row in (tokens()[0], tokens(seed=2)[0, :70])]
    model = patch(tiny(), "turbo")
    answers = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        texts, batch_size=2, return_full_text=False, **GREEDY
    )
    for text, answer in zip(texts, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert (
            answer[0]["generated_text"].split()
            == tokenizer.decode(model.generate(**{"inputs": ids}, **GREEDY)[0, ids.shape[1] :]).split()
        )
    assert report(model).to_dict()["packed_tokens"] >= 64


@every_method
def test_scoring_right_padded_text_equals_the_rows_alone(method):
    model, (ids, mask) = patch(tiny(), method), padded()
    right = ids.flip(1)
    logits = model(right, attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(logits[0, :-PAD], model(right[:1, :-PAD]).logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[1], model(right[1:]).logits[0], rtol=0, atol=1e-5)


@every_method
def test_greedy_by_hand_equals_generate(method):
    model, ids = patch(tiny(), method), tokens()
    text, new = ids, ids
    cache = None
    for _ in range(NEW):
        out = model(new, past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
        text = torch.cat([text, new], 1)
    assert isinstance(cache, QAttnCache)
    assert torch.equal(text, model.generate(ids, **GREEDY))


@pytest.mark.parametrize("through", ["model", "decoder"])
def test_plain_call_makes_a_packed_cache(through):
    model = patch(tiny(), "turbo")
    out = (model if through == "model" else model.get_decoder())(tokens())
    assert isinstance(out.past_key_values, QAttnCache)
    assert report(out.past_key_values).to_dict()["packed_tokens"] == PROMPT // 64 * 64


@every_method
def test_sampling_with_a_seed_repeats(method):
    model, (ids, mask) = patch(tiny(), method), padded()
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(
            model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=2, max_new_tokens=NEW)
        )
    assert runs[0].shape == (4, PROMPT + NEW)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_unpacked_samples_and_beams_equal_the_stock_cache():
    model, (ids, mask) = tiny(), padded()
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": NEW, "do_sample": False}
    sample = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": NEW}

    def answers() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [model.generate(ids, attention_mask=mask, **how) for how in (beams, sample)]

    want = answers()
    patch(model, "none")
    assert all(torch.equal(a, b) for a, b in zip(answers(), want, strict=True))


def test_streamer_hears_every_token():
    class Words:
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return "".join(f"{int(i)} " for i in ids)

    model, ids = patch(tiny(), "turbo"), tokens()
    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    want = model.generate(ids, streamer=streamer, **GREEDY)[0, PROMPT:]
    assert "".join(streamer).split() == [str(int(i)) for i in want]


@every_method
def test_embeddings_equal_token_ids(method):
    model, (ids, mask) = patch(tiny(), method), padded()
    embeds = model.get_input_embeddings()(ids)
    got = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, **GREEDY)[:, PROMPT:])


@pytest.mark.parametrize("patched", ["main", "both", "assistant"])
def test_assisted_generation_equals_greedy(patched):
    model, small, ids = tiny(), tiny(seed=1, hidden_size=32), tokens()
    want = model.generate(ids, **GREEDY)
    for one, who in ((model, ("main", "both")), (small, ("assistant", "both"))):
        if patched in who:
            patch(one, "none")
    assert torch.equal(model.generate(ids, assistant_model=small, **GREEDY), want)
    small = copy.deepcopy(model)  # its drafts are right, so most are accepted
    assert torch.equal(model.generate(ids, assistant_model=small, **GREEDY), want)


# What `patch` leaves alone


def test_only_this_instance_is_patched():
    config = LlamaConfig(**GQA)
    torch.manual_seed(0)
    model, other = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    before, ids = copy.deepcopy(model), tokens()
    want, others = model(ids).logits, other(ids).logits
    patch(model, "turbo")
    assert not torch.equal(model(ids).logits, want)
    assert torch.equal(other(ids).logits, others)
    assert torch.equal(before(ids).logits, want)
    for stock in (other, before, AutoModelForCausalLM.from_config(config)):
        assert type(stock(ids).past_key_values).__name__ == "DynamicCache"


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_unpatch_restores_every_bit(family):
    model, ids = tiny(FAMILIES[family]), tokens()
    want, text, keys = model(ids).logits, model.generate(ids, **GREEDY), list(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    patch(model, "turbo")
    assert not torch.equal(model(ids).logits, want)
    assert list(model.state_dict()) == keys
    assert unpatch(model) is model
    assert torch.equal(model(ids).logits, want)
    assert torch.equal(model.generate(ids, **GREEDY), text)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_second_patch_replaces_the_first():
    model, ids = tiny(), tokens()
    want, int8 = model(ids).logits, patch(tiny(), "int8")(ids).logits
    assert patch(patch(model, "turbo", bits=2), "int8") is model
    assert torch.equal(model(ids).logits, int8)
    assert report(model).to_dict()["method"] == "int8"
    unpatch(model)
    assert torch.equal(model(ids).logits, want)
    with pytest.raises(QAttnError, match="not patched"):
        unpatch(model)


def by_torch(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_torch])
def test_copies_of_a_patched_model_are_patched(copied):
    model, ids = tiny(), tokens()
    logits = model(ids).logits
    patch(model, "turbo", bits=2)
    want = model.generate(ids, **GREEDY)
    split_int8 = copied(model)
    assert torch.equal(split_int8.generate(ids, **GREEDY), want)
    assert report(split_int8).to_dict()["recipe"]["bits"] == 2
    assert torch.equal(unpatch(split_int8)(ids).logits, logits)
    assert torch.equal(model.generate(ids, **GREEDY), want), "undoing the copy undid the original"


def test_pickle_runs_where_nothing_was_patched_yet(monkeypatch):
    """As in another process: there transformers does not know the attention's name."""
    model, ids = patch(tiny(), "turbo"), tokens()
    want, data = model(ids).logits, pickle.dumps(model)
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "qattn")
    assert torch.equal(pickle.loads(data)(ids).logits, want)


def test_saved_model_is_stock(tmp_path):
    model, ids = tiny(), tokens()
    want = model(ids).logits
    patch(model, "turbo").save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert "qattn" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, want)
    assert type(loaded(ids).past_key_values).__name__ == "DynamicCache"
    fresh = tiny(seed=9)
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(fresh(ids).logits, want)
    model.load_state_dict(fresh.state_dict())
    assert isinstance(model(ids).past_key_values, QAttnCache)
