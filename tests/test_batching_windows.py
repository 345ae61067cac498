"""Continuous batching of models with sliding windows, chunks, learned sinks, and keys that layers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from batching import NEW, Fault, answer, break_token, outputs, running
from helpers import DEVICE, random_qkv
from small_types import SHARED_KEYS, tiny
from test_continuous_batching import alone, batched, needs_pages, prompts_of
from test_window_layer import CLOSE, windowed

from qattn_hf import UnsupportedError, patch, report
from qattn_hf.generate.continuous.batch import Held, batches
from qattn_hf.generate.continuous.rings import AT_ONCE, RingLayer
from qattn_hf.layer.window_layer import WindowLayer
from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import Geometry, State

pytestmark = needs_pages
LENGTHS = (5, 300, 1, 64)  # the second is longer than the ring of a window of 20 tokens, which is 256
SHORT = {"max_new_tokens": NEW}


@pytest.mark.product
@pytest.mark.parametrize(
    ("model_type", "method", "changes"),
    [
        ("gemma3_text", "none", {}),
        ("gemma3_text", "turbo", {}),
        ("gemma3_text", "kivi", {}),  # whose blocks are smaller than blocks of windows
        ("gemma3_text", "int8:sliding=packed", {}),
        ("gemma3_text", "turbo:sliding=packed", {}),
        ("gpt_oss", "int8", {}),
        ("mistral", "turbo:sliding=packed", {}),  # all layers have windows
        ("llama4_text", "none", {"floor_scale": 8}),  # queries are scaled by their positions
        ("gemma3n_text", "turbo", {}),
        ("gemma3n_text", "int8:sliding=packed", {}),
        ("gemma4_text", "int8", {}),
        ("gemma4_text", "turbo", {"num_hidden_layers": 6, **SHARED_KEYS}),
    ],
)
def test_requests_get_what_generate_gives_each_alone(model_type: str, method: str, changes: dict[str, Any]):
    """Steps go past a block, and prompts past windows."""
    model, prompts = patch(tiny(model_type, **changes), method), prompts_of(*LENGTHS)
    assert batched(model, prompts) == [alone(model, prompt) for prompt in prompts]
    pages = report(model).to_dict()["continuous_batching"]
    assert pages["most_requests"] == len(prompts) and not pages["shares_prefixes"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "turbo:sliding=packed"])
def test_kernels_serve_windows(method: str):
    model = patch(tiny("gpt_oss", head_dim=64).to(DEVICE), method, impl="triton")
    prompts, short = prompts_of(63, 130), {"max_new_tokens": 3}
    assert batched(model, prompts, **short) == [alone(model, prompt, **short) for prompt in prompts]


def fed(layer: WindowLayer, qkv: Any, begin: int, count: int) -> torch.Tensor:
    """Feed `count` tokens to a layer of a cache; its output `[1, Hq, T, D]`."""
    q, k, v = (x[:, :, begin : begin + count] for x in qkv)
    span = torch.tensor([[0, count]], dtype=torch.int32, device=q.device)
    return layer.attend(q, layer.update(k, v)[0], span, Scores(0.125))[0]


class Served:
    """Rows of one layer with a window, called as a forward calls them."""

    def __init__(self, case: Any, window: int, slots: int = 3, dim: int = 32, impl: str = "reference"):
        self.device = torch.device("cpu" if impl == "reference" else DEVICE)
        layer = windowed(case, window, impl=impl)
        self.spec = layer.spec
        layout = Layout(Geometry(1, 2, dim, dim, 1, torch.float32), self.spec)
        self.layer = RingLayer(layout, slots, self.device, layer.constants)
        self.slots, self.lengths = slots, [0] * slots

    def call(self, qkv: Any, counts: Iterable[int], again: bool = False) -> dict[int, torch.Tensor]:
        """Feed `counts` tokens to the rows, each from the same keys and values; outputs `[1, Hq, T, D]` by row."""
        requests = [Held(i, self.lengths[i], n, [], self.lengths[i] == 0) for i, n in enumerate(counts)]
        q, k, v = (torch.cat([x[:, :, one.past : one.past + one.tokens] for one in requests], 2) for x in qkv)
        held = [self.layer.ring.held(one) for one in requests]
        found = torch.zeros(q.shape[2] + 1, 4, v.shape[3], device=self.device)
        for rows in batches(held, self.spec.window, self.device, self.slots, self.layer.in_place):
            some = [x[0].transpose(0, 1)[rows.columns].transpose(1, 2) for x in (q, k, v)]
            out = self.layer.attend(rows, *some, Scores(0.125))
            found[rows.targets] = out.transpose(1, 2)
            if again:
                state = [one.clone() for one in self.layer.buffers]
                assert torch.equal(self.layer.attend(rows, *some, Scores(0.125), again=True), out)
                assert all(map(torch.equal, state, self.layer.buffers))
        self.lengths = [one.past + one.tokens for one in requests]
        parts = found[:-1].split([one.tokens for one in requests])
        return {one.slot: part.transpose(0, 1)[None] for one, part in zip(requests, parts, strict=True) if one.tokens}

    def state(self, slot: int) -> State:
        """What a row holds, as an arena has it."""
        (rows,) = batches([self.layer.ring.held(Held(slot, self.lengths[slot], 1, [], False))], self.spec.window,
                          self.device, self.slots)  # fmt: skip
        return views(*self.layer.gather(rows))


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize(
    ("case", "window", "again"),
    [
        (("none", {}), 20, True),
        (("turbo", {"sink_num": 0}), 20, False),
        (("turbo", {"sink_num": 0}), -200, True),
        (("kivi", {}), -70, False),
        (("nf4", {}), 200, True),
    ],
)
def test_a_ring_holds_the_codes_of_a_packed_window(case: Any, window: int, again: bool):
    """Bit for bit, with tokens that are masked, in calls of many lengths, whoever had the row before."""
    served, qkv = Served(case, window), random_qkv(1, 2000)
    served.layer.read_again = again
    for begin in (30, 260, 300, 470):  # later blocks take the pages of these
        qkv[1][:, :, begin : begin + 3] = torch.nan
    served.call(qkv, (700, 0, 40))
    served.call(qkv, (0, 90, 0))
    served.layer.clear_rows(torch.tensor([0, 1]))
    served.lengths[:2] = 0, 0
    alone = [windowed(case, window) for _ in range(3)]
    fed(alone[2], qkv, 0, 40)
    for counts in ((70, 1, 1), (1, 1, 1), (300, 129, 60), *[(1, 1, 1)] * 80, (40, 0, 500), (1, 33, 1), (0, 1, 1)):
        past = list(served.lengths)
        out = served.call(qkv, counts, again)
        for slot, count in enumerate(counts):
            if count:
                torch.testing.assert_close(out[slot], fed(alone[slot], qkv, past[slot], count), **CLOSE)
    for slot, layer in enumerate(alone):
        mine, theirs = served.state(slot), layer.state
        held = int(mine["closed"])
        assert 0 < held <= served.layer.ring.pages
        for name, spec in layer.tensor_specs().items():
            if spec.block_dim is not None:
                first = int(theirs["closed"]) - held
                want = theirs[name].narrow(spec.block_dim, first, held) if first >= 0 else theirs[name]
                got = mine[name].narrow(spec.block_dim, max(0, -first), held + min(0, first))
                assert torch.equal(got, want.narrow(spec.block_dim, 0, got.shape[spec.block_dim])), name


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.product
@pytest.mark.parametrize("case", [("none", {}), ("turbo", {"sink_num": 0})])
def test_kernels_read_a_ring_in_place(case: Any):
    """Steps over which blocks leave, and a second layer that reads the same keys."""
    served, layers = Served(case, 20, dim=64, impl="triton"), [windowed(case, 20, impl="triton") for _ in range(2)]
    qkv, first = [x.to(DEVICE) for x in random_qkv(1, 400, dim=64)], AT_ONCE * 64 + 128 - 2
    served.layer.read_again = True
    assert served.layer.in_place
    for counts in ((first, 70, 0), *[(1, 1, 0)] * 4, (1, 0, 5)):
        past = list(served.lengths)
        out = served.call(qkv, counts, again=True)
        for slot in out.keys() & {0, 1}:
            torch.testing.assert_close(out[slot], fed(layers[slot], qkv, past[slot], counts[slot]), **CLOSE)
    assert served.layer.rows["closed"].tolist() == [2, 1, 0]


def test_rows_of_requests_that_failed_or_were_cancelled_serve_others():
    """Of two rows; `none` reads a request again as exactly as before."""
    model, prompts = patch(tiny("gemma3_text"), "none"), prompts_of(300, 5, 64, 290)
    want = [alone(model, prompt, **SHORT) for prompt in prompts]
    with running(model, batching={"max_requests_per_batch": 2}) as manager:
        Fault(manager.batch_processor.model_runner, "compute_batch", [2], RuntimeError("once"))
        with manager.pause():
            ids = manager.add_requests(prompts)
            late = manager.add_request(prompts[0], max_new_tokens=200)
        manager.cancel_request(late)
        found = outputs(manager, ids)
        assert [(found[one].error, found[one].generated_tokens) for one in ids] == [(None, one) for one in want]
        assert answer(manager, prompts[3]) == want[3]
        metrics = manager.metrics()
        assert metrics["forwards_failed"] == 1 and metrics["requests_cancelled"] == 1
        assert metrics["blocks_used"] == metrics["bytes_packed"] == 0


def test_a_row_hides_no_token_for_the_sake_of_an_earlier_request():
    """Masks of tokens that were not finite lie in pages of the row, where the next request begins a block."""
    model = tiny("gemma3_text")
    break_token(model, 90)
    patch(model, "int8:sliding=packed")
    prompt = [1, *[90] * 62]
    with running(model, batching={"max_requests_per_batch": 1}) as manager:
        answer(manager, [2, *[90] * 299], max_new_tokens=1)
        assert answer(manager, prompt) == alone(model, prompt, **SHORT)


def test_answers_of_one_prompt_fork_its_ring():
    model, (prompt,) = patch(tiny("gemma3_text"), "turbo:sliding=packed"), prompts_of(300)
    got = batched(model, [prompt], do_sample=True, top_k=1, num_return_sequences=3, **SHORT)
    assert got == [alone(model, prompt, **SHORT)] * 3


def test_requests_that_begin_alike_share_no_pages():
    model, (prefix, *ends) = patch(tiny("gemma3_text"), "int8"), prompts_of(192, 5, 30)
    prompts = [prefix + end for end in ends]
    got = batched(model, prompts, batching={"max_requests_per_batch": 1}, **SHORT)
    assert got == [alone(model, prompt, **SHORT) for prompt in prompts]


def test_a_ring_takes_the_bytes_of_its_window():
    """A row has the pages of the window, whatever its length; the full layer has pages of the pool."""
    model = patch(tiny("gemma3_text"), "none")
    batched(model, prompts_of(5), **SHORT)
    pages, config = report(model).to_dict()["continuous_batching"], model.config
    token = 2 * config.num_key_value_heads * config.head_dim * 4
    assert pages["bytes_per_block"] < 1.1 * 64 * token  # of one layer
    ring = (2 + AT_ONCE) * 64 * token  # open tokens, one closed block, and those that leave together
    assert ring < pages["bytes_per_request"] < 2 * ring


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen3_next", "ATTN_TYPE_TO_ALLOCATOR"),
        ("lfm2_moe", "convolution"),
        ("falcon_h1", "linear attention or SSM"),
        ("deepseek_v3", "latent attention"),
        ("hrm_text", "calls its layers several times for each token"),
    ],
)
def test_layers_without_pages_are_refused_in_words(model_type: str, why: str):
    with pytest.raises(UnsupportedError, match=why):
        batched(patch(tiny(model_type), "none"), prompts_of(5))


def test_heads_that_a_config_does_not_name_are_refused():
    """The windows of this type have twice the KV heads of its config."""
    model = patch(tiny("mimo_v2_flash"), "none")
    with running(model) as manager:
        (first,) = manager.add_requests(prompts_of(5))
        assert "KV heads" in outputs(manager, [first])[first].error
