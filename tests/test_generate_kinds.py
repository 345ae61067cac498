"""Features of `generate` beyond greedy answers, through packed caches: drafts, scores, stop strings, chats.

`none` packs nothing, so its answers equal the stock cache's. Other methods are compared with their own plain calls.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import random_ids, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from qattn_hf import patch
from qattn_hf.assets import demo_model_dir

pytestmark = pytest.mark.usefixtures("no_grad")

DEMO_MODEL = demo_model_dir()
PROMPT, NEW = 70, 12
IDS = random_ids(1, PROMPT)
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


def lively(**changes: object) -> LlamaForCausalLM:
    """A random Llama whose weights are large enough for answers that are not one token over and over."""
    return tiny_llama(initializer_range=0.1, **changes)


# Drafts


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_schedules_of_assistant_tokens(schedule, right):
    """A right draft lengthens what the heuristics ask for next, a wrong one shortens it; the answer stays."""
    model = lively()
    draft = copy.deepcopy(model) if right else tiny_llama(hidden_size=32)
    want = model.generate(IDS, **GREEDY)
    for one in (model, draft):
        patch(one, "none")
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.num_assistant_tokens = 3
    assert torch.equal(model.generate(IDS, assistant_model=draft, **GREEDY), want)
    kept = draft.generation_config.num_assistant_tokens
    assert {"heuristic": (kept > 3) == right, "constant": kept == 3, "heuristic_transient": kept == 3}[schedule]


@pytest.mark.parametrize("method", ["none", "int8"])
def test_a_draft_that_exits_early_leaves_the_answer(method):
    model = patch(lively(), method)
    want = model.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, assistant_early_exit=1, **GREEDY), want)
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert model.config.num_hidden_layers == 2


@pytest.mark.slow
def test_sampled_drafts_equal_those_of_the_stock_cache():
    def answer(method: str | None) -> torch.Tensor:
        model, draft = lively(), lively(hidden_size=32)
        if method:
            for one in (model, draft):
                patch(one, method)
        torch.manual_seed(3)
        return model.generate(IDS, assistant_model=draft, do_sample=True, max_new_tokens=NEW)

    want = answer(None)
    assert torch.equal(answer("none"), want)
    assert answer("turbo").shape == want.shape


def test_draft_with_another_tokenizer():
    """Universal assisted decoding: drafts are text on the way, so that the vocabularies may differ."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer("Once upon a time there was", return_tensors="pt").input_ids
    want = model.generate(ids, **GREEDY)
    draft = copy.deepcopy(model)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<another>"])
    draft.resize_token_embeddings(len(other))
    for one in (model, draft):
        patch(one, "none")
    got = model.generate(ids, assistant_model=draft, tokenizer=tokenizer, assistant_tokenizer=other, **GREEDY)
    assert torch.equal(got, want)


# Beams that transformers moved to other repositories


@pytest.mark.parametrize(
    "asked", [{"num_beam_groups": 2, "diversity_penalty": 0.5}, {"force_words_ids": [[5]]}], ids=str
)
def test_group_and_constrained_beams_are_asked_for_by_custom_generate(asked):
    model = patch(lively(), "turbo")
    want = model.generate(IDS, **GREEDY)
    with pytest.raises(ValueError, match=r"Beam Search requires `trust_remote_code=True`"):
        model.generate(IDS, num_beams=4, **asked, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), want)


# What comes back


def test_scores_and_logits_are_those_of_the_stock_cache():
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **GREEDY}
    model = lively()
    want = model.generate(IDS, repetition_penalty=1.3, **asked)
    got = patch(model, "none").generate(IDS, repetition_penalty=1.3, **asked)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == NEW
        # fp32 sums of another order
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(want[name]), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "turbo"])
def test_stop_strings_cut_the_answer(method):
    model = patch(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32), method)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    inputs = tokenizer("Once upon a time there was", return_tensors="pt")
    start = inputs.input_ids.shape[1]
    whole = model.generate(**inputs, **GREEDY)[0, start:]
    stop = tokenizer.decode(whole[3:5])
    cut = model.generate(**inputs, stop_strings=[stop], tokenizer=tokenizer, **GREEDY)[0, start:]
    assert len(cut) < NEW and torch.equal(cut, whole[: len(cut)])
    assert stop in tokenizer.decode(cut)


# Chats

TEMPLATE = (
    "{% for tool in tools or [] %}[tool] {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, [add]], ids=["system", "tools"])
def test_chat_keeps_its_cache_over_turns(tools):
    """The system prompt, the tools and every turn are read once: each call brings its new tokens alone."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    messages = [{"role": "system", "content": "Answer in the words of a child. " * 8}]
    turns = [[{"role": "user", "content": "Tell me of a dog."}], [{"role": "user", "content": "And of its friend?"}]]
    if tools:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        turns[1] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": str(add(1, 2))},
        ]

    text = torch.empty(1, 0, dtype=torch.long)
    patch(model, "none")
    cache = None
    read = []
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    for turn in turns:
        before = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=TEMPLATE, tools=tools)
        messages += turn
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, chat_template=TEMPLATE, tools=tools, add_generation_prompt=True
        )
        said = whole if cache is None else whole[len(before) :]
        new = tokenizer(said, return_tensors="pt", add_special_tokens=False).input_ids
        text = torch.cat([text, new], 1)
        start = text.shape[1]
        read.clear()
        out = model.generate(text, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
        assert sum(read) <= new.shape[1] + NEW  # the last token of the answer before is read now
        text, cache = out.sequences, out.past_key_values
        fresh = model.generate(text[:, :start], **GREEDY)
        assert torch.equal(fresh, text)
        messages.append({"role": "assistant", "content": tokenizer.decode(text[0, start:])})
