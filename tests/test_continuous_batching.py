"""Continuous batching over packed pages: each request gets what `generate` gives it alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import DEVICE, make_layer, random_qkv, tiny_llama
from transformers import GenerationConfig, PreTrainedModel

from qattn_hf import QAttnCache, UnsupportedError, list_methods, patch, report, unpatch
from qattn_hf.generate.continuous import transformers_api
from qattn_hf.generate.continuous.batch import Held, batches
from qattn_hf.generate.continuous.page_layout import by_block, bytes_of, resized
from qattn_hf.generate.continuous.pages import PagedLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import Geometry

needs_pages = pytest.mark.skipif(
    transformers_api.continuous_api is None, reason="this transformers has no pool that packed pages fit"
)
pytestmark = needs_pages
NEW = 20  # tokens of an answer: some prompts end less before a block boundary
EQUALIZED = "turboquant:k_format=turbo4,equalize_k=true"
METHODS = [*list_methods(), "turbo:bits=mixed", "turbo_paper", EQUALIZED]


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 60) for _ in range(length)] for length in lengths]


def config(**settings: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **settings}
    )


def batched(model: PreTrainedModel, prompts: list[list[int]], blocks: int = 64, **settings: Any) -> list[list[int]]:
    """Return the answers of `generate_batch` over a pool of `blocks` blocks of 64 tokens."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    given = {"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 512, **settings.pop("batching", {})}
    made = model.generate_batch(prompts, config(**settings), ContinuousBatchingConfig(**given))
    assert [one.error for one in made.values()] == [None] * len(made)
    return [one.generated_tokens for one in made.values()]


def alone(model: PreTrainedModel, prompt: list[int], first: int = 0, **settings: Any) -> list[int]:
    """Return the answer of `generate`. The first `first` tokens of the prompt are a separate call."""
    ids = torch.tensor([prompt], device=model.device)
    cache = QAttnCache.for_model(model)
    if first:
        with torch.no_grad():
            model(ids[:, :first], past_key_values=cache)
    given = {"past_key_values": cache} if first else {}
    made = model.generate(ids, config(eos_token_id=None, **settings), attention_mask=torch.ones_like(ids), **given)
    return made[0, len(prompt) :].tolist()


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
def test_requests_get_what_generate_gives_each_alone(method: str):
    model, prompts = patch(tiny_llama(), method), prompts_of(50, 130, 1, 64)
    got = batched(model, prompts)
    pages = report(model).to_dict()["continuous_batching"]
    printed = " ".join(str(report(model)).split())  # of lines that end where 100 columns do
    assert pages["most_requests"] == len(prompts) and f"{len(prompts)} were held" in printed
    assert got == [alone(model, prompt) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.product("turbo")
@pytest.mark.parametrize("method", ["turbo", "int8", "kivi", "sinkq", EQUALIZED])
def test_kernels_serve_requests(method: str):
    """Steps over pages by a table; prompts of several lengths."""
    model = patch(tiny_llama(head_dim=64, num_hidden_layers=1).to(DEVICE), method, impl="triton")
    prompts = prompts_of(5, 63, 130)
    short = {"max_new_tokens": 3}
    assert batched(model, prompts, **short) == [alone(model, prompt, **short) for prompt in prompts]


@pytest.mark.product
@pytest.mark.parametrize("method", ["none", "turbo", "kivi", "sinkq", "sage2"])
def test_pages_hold_the_codes_of_a_cache(method: str):
    """Bit for bit, in calls of many lengths, between requests whose pages lie in between."""
    spec = make_layer((method, {})).spec
    layout = Layout(Geometry(1, 2, 16, 16, 1, torch.float32), spec)
    pages, slots, block = 40, 3, spec.window.block
    memory = torch.zeros(bytes_of(by_block(resized(layout, 1, pages))), dtype=torch.uint8)
    paged = PagedLayer(layout, memory, pages, slots)
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)).add(1).tolist()
    tables = [order[slot::slots] for slot in range(slots)]
    layers = [QAttnLayer(spec) for _ in range(slots)]
    lengths = [0] * slots
    for turn, tokens in enumerate((70, 1, 1, 129, 5, 60, 1, 1, 1)):
        requests = []
        for slot in range(slots):
            count = tokens if tokens == 1 else tokens + slot
            held = -(-(lengths[slot] + count) // block)
            requests.append(Held(slot, lengths[slot], count, tables[slot][:held], lengths[slot] == 0))
        qkv = [random_qkv(1, one.tokens, 10 * turn + slot, 16) for slot, one in enumerate(requests)]
        columns = [torch.cat(parts, 2) for parts in zip(*qkv, strict=True)]
        for rows in batches(requests, spec.window, memory.device, slots):
            q, k, v = (x[0].transpose(0, 1)[rows.columns].transpose(1, 2) for x in columns)
            paged.attend(rows, q, k, v, Scores(0.25))
        for slot, (layer, (q, k, v), one) in enumerate(zip(layers, qkv, requests, strict=True)):
            span = torch.tensor([[0, one.tokens]], dtype=torch.int32)
            layer.attend(q, layer.update(k, v)[0], span, Scores(0.25))
            lengths[slot] += one.tokens
    for slot, layer in enumerate(layers):
        held = Held(slot, lengths[slot], 1, tables[slot][: -(-lengths[slot] // block)], False)
        (rows,) = batches([held], spec.window, memory.device, slots)
        arena, where = paged.gather(rows)
        state = views(arena, where)
        closed = int(layer.state["closed"])
        assert closed == int(state["closed"])
        for name, tensor in layer.tensor_specs().items():
            if tensor.block_dim is not None:
                mine, theirs = (x[name].narrow(tensor.block_dim, 0, closed) for x in (state, layer.state))
                assert torch.equal(mine, theirs), name


@pytest.mark.slow
def test_a_pool_that_is_too_small_for_all_reads_some_again():
    """A request whose next block is not there gives its own back. Where codes are exact its answer is as before; one of
    packed codes, read again as a prompt, differs by roundings as every prompt does from steps."""
    model, prompts = patch(tiny_llama(), "none"), prompts_of(50, 120, 60, 180, 90)
    assert batched(model, prompts, blocks=8) == [alone(model, prompt) for prompt in prompts]
    answers = batched(patch(model, "turbo"), prompts, blocks=8)
    assert [len(answer) for answer in answers] == [NEW] * len(prompts)


def test_the_report_counts_clamped_scales_of_a_pool_that_is_gone():
    model, prompts = tiny_llama(num_hidden_layers=1, head_dim=64, initializer_range=0.15), prompts_of(130, 200)
    attention = model.model.layers[0].self_attn
    assert attention.v_proj.weight.data.mul_(1e7).isfinite().all()
    batched(patch(model, "turboquant:v_format=q4"), prompts)
    pages = report(model).to_dict()["continuous_batching"]
    assert pages["clamped_scales"] > 0
    assert f"{pages['clamped_scales']} scales at the end of fp16" in " ".join(str(report(model)).split())
    attention.v_proj.weight.data.div_(1e7)
    batched(patch(model, "turboquant:v_format=q4"), prompts)
    assert report(model).to_dict()["continuous_batching"]["clamped_scales"] == 0


@pytest.mark.parametrize(
    ("method", "tokens", "new", "unread"),
    [
        ("kivi:residual_length=0", 130, 1, True),
        ("kivi:residual_length=0", 130, 3, False),
        ("kivi:residual_length=128", 130, 3, True),  # no block is closed
        ("int8", 130, 1, False),
        ("none", 130, 3, None),
    ],
)
def test_the_report_says_whether_requests_read_codes(method: str, tokens: int, new: int, unread: bool | None):
    model = patch(tiny_llama(), method)
    batched(model, prompts_of(tokens), max_new_tokens=new)
    assert report(model).to_dict()["continuous_batching"]["unread"] is unread
    assert ("no token has read a code" in " ".join(str(report(model)).split())) == bool(unread)


@pytest.mark.slow
def test_requests_wait_for_a_row():
    model, prompts = patch(tiny_llama(), "turbo"), prompts_of(50, 130, 64)
    got = batched(model, prompts, batching={"max_requests_per_batch": 2})
    pages = report(model).to_dict()["continuous_batching"]
    assert (pages["requests"], pages["most_requests"]) == (2, 2)
    assert got == [alone(model, prompt) for prompt in prompts]


@pytest.mark.product
@pytest.mark.parametrize("method", ["turbo", "int8", "kivi"])
def test_answers_of_one_prompt_fork_its_pages(method: str):
    """Two samples of the likeliest token alone are the greedy answer, twice."""
    model, (prompt,) = patch(tiny_llama(), method), prompts_of(180)
    got = batched(model, [prompt], do_sample=True, top_k=1, num_return_sequences=3)
    assert got == [alone(model, prompt)] * 3


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ("turbo:sink_num=0", True),
        ("turbo:bits=mixed,sink_num=0", False),
        ("int8", True),
        ("sage2", False),
        ("paper_sinkq:sink_prefill=whole,sink_skip_layers=0", False),
    ],
)
def test_a_prefix_is_shared_where_its_blocks_are_all_that_is_kept(method: str, shares: bool):
    model, (prefix, *ends) = patch(tiny_llama(), method), prompts_of(192, 5, 30, 50)
    prompts = [prefix + end for end in ends]
    want = [alone(model, prompt) for prompt in prompts]
    assert batched(model, prompts, batching={"max_requests_per_batch": 1}) == want  # one begins when another has ended
    pages = report(model).to_dict()["continuous_batching"]
    assert pages["shares_prefixes"] == shares


def calls_of(model: PreTrainedModel) -> list[int]:
    """Takes the tokens of each forward from here on."""
    seen: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    return seen


def test_shared_blocks_are_read_once():
    model, (prefix, *ends) = patch(tiny_llama(), "turbo:sink_num=0"), prompts_of(192, 5, 30)
    seen = calls_of(model)
    batched(model, [prefix + end for end in ends], batching={"max_requests_per_batch": 1})
    assert [tokens for tokens in seen if tokens > 1] == [197, 30]


ALL = "sink_skip_layers=0"  # the model has two layers
WITH_ROWS = [
    "turbo",
    "turbo_sink",
    f"sinkq:{ALL}",
    f"low2:{ALL}",
    f"low3:{ALL}",
    "kivi",
    "turbo:sink_num=1,sink_window=0",
]


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("method", WITH_ROWS)
def test_a_prefix_with_sinks_is_shared_with_its_row(method: str):
    """Answers equal the answers to requests whose prefix was a separate call, whatever the writing request did."""
    model, (prefix, *ends) = patch(tiny_llama(), method), prompts_of(256, 5, 50, 3)
    prompts = sorted((prefix + end for end in ends), reverse=True)  # as `generate_batch` orders them
    want = [alone(model, prompts[0])] + [alone(model, prompt, first=256) for prompt in prompts[1:]]
    seen = calls_of(model)
    assert batched(model, prompts, batching={"max_requests_per_batch": 1}) == want
    assert [tokens for tokens in seen if tokens > 1] == [len(prompts[0]), *(len(one) - 256 for one in prompts[1:])]
    assert report(model).to_dict()["continuous_batching"]["shares_prefixes"]


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("method", ["turbo", f"sinkq:{ALL}"])
def test_a_prefix_is_kept_where_prompts_part(method: str):
    """The second request reads the prefix in a separate call. From the third request on it is shared."""
    model, (prefix, *ends) = patch(tiny_llama(), method), prompts_of(256, 133, 140, 180)
    prompts = sorted((prefix + end for end in ends), reverse=True)
    want = [alone(model, prompts[0])] + [alone(model, prompt, first=256) for prompt in prompts[1:]]
    seen = calls_of(model)
    assert batched(model, prompts, batching={"max_requests_per_batch": 1}) == want
    rest = [len(one) - 256 for one in prompts[1:]]
    assert [tokens for tokens in seen if tokens > 1] == [len(prompts[0]), 256, *rest]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.product("turbo")
@pytest.mark.parametrize("method", ["turbo", "turbo:sink_num=1,sink_window=0", f"sinkq:{ALL},group_size=64", "kivi"])
def test_kernels_share_prefixes_with_rows(method: str):
    """Steps read shared pages by a table, and masks of the row's own."""
    model = patch(tiny_llama(head_dim=64, num_hidden_layers=1).to(DEVICE), method, impl="triton")
    prefix, *ends = prompts_of(128, 3, 2)
    prompts = sorted((prefix + end for end in ends), reverse=True)
    short = {"max_new_tokens": 2}
    want = [alone(model, prompts[0], **short), alone(model, prompts[1], first=128, **short)]
    seen = calls_of(model)
    assert batched(model, prompts, batching={"max_requests_per_batch": 1}, **short) == want
    assert [tokens for tokens in seen if tokens > 1] == [len(prompts[0]), len(prompts[1]) - 128]


@pytest.mark.slow
def test_requests_that_run_at_once_share_pages():
    model, (prefix, *ends) = patch(tiny_llama(), "turbo"), prompts_of(192, 5, 6, 7, 8)
    batched(model, [prefix + ends[0]])
    apart = report(model).to_dict()["continuous_batching"]["most_blocks"]
    from batching import answer, outputs, running

    prompts = [prefix + end for end in ends]
    want = [alone(model, prompts[0], max_new_tokens=20)]
    want += [alone(model, prompt, first=192, max_new_tokens=20) for prompt in prompts[1:]]
    with running(model, max_new_tokens=20) as manager:
        got = [answer(manager, prompts[0])]
        with manager.pause():
            ids = manager.add_requests(prompts[1:])
        found = outputs(manager, ids)
        assert got + [found[one].generated_tokens for one in ids] == want
        figures = manager.batch_processor.cache.figures
        assert figures["most_requests"] == 3
        assert (apart, figures["most_blocks"]) == (4, 3 + 3 * 1)  # three pages, and one of each request's own
        assert manager.metrics()["blocks_used"] == 0 and manager.metrics()["blocks_cached"] == 3


def test_a_page_takes_a_third_of_what_it_takes_in_model_precision(monkeypatch: pytest.MonkeyPatch):
    """turbo's 4.3 bits and its ring, of a bf16 model with heads as people run them, where requests are long."""
    room = 2**28
    memory = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
    monkeypatch.setattr(memory, lambda: (torch.device("cpu"), room, 0, 0))
    model = tiny_llama(head_dim=128, num_hidden_layers=12).to(torch.bfloat16)
    sizes = {"num_blocks": None, "max_memory_percent": 1.0, "max_batch_tokens": 64, "max_requests_per_batch": 4}
    patch(model, "turbo")
    batched(model, prompts_of(5), batching=sizes, max_new_tokens=2)
    pages = report(model).to_dict()["continuous_batching"]
    assert pages["bytes"] < room
    tokens = pages["blocks"] * pages["page_tokens"]
    bf16 = 2 * model.config.num_hidden_layers * 2 * 128 * 2
    assert tokens > 2.5 * room / bf16  # 3.7 for the codes alone; the rest are rows, indices and a layer's working room


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"use_cuda_graph": True}, "captured steps"),
        ({"use_async_batching": True}, "asynchronous"),
        ({"default_compile_level": 1}, "compiled steps"),
        ({"cpu_offload_space": 1.0}, "offloading"),
    ],
)
def test_settings_that_packed_pages_do_not_have_are_named(setting: dict[str, Any], what: str):
    model = patch(tiny_llama(), "int8")
    with pytest.raises(UnsupportedError, match=what):
        batched(model, prompts_of(5), batching=setting)
    assert len(batched(model, prompts_of(5))) == 1


def test_models_without_packed_pages_are_refused():
    with pytest.raises(UnsupportedError, match="packs nothing"):
        batched(patch(tiny_llama(), "sage2", cache="model"), prompts_of(5))
    mixed = patch(tiny_llama(), "kivi", layers={"0": {"bits": 4, "group_size": 64}})
    with pytest.raises(UnsupportedError, match="different sizes"):
        batched(mixed, prompts_of(5))


def test_unpatch_gives_transformers_own_pool_back():
    model, (prompt,) = tiny_llama(), prompts_of(120)
    stock = batched(model, [prompt])
    patch(model, "none")
    assert batched(model, [prompt]) == stock
    assert report(model).to_dict()["continuous_batching"] is not None
    unpatch(model)
    assert batched(model, [prompt]) == stock
