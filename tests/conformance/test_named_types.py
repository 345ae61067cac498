"""Well-known model types, each with everything that a cache supports, in one matrix.

Rows are types, with windows left to the model, packed (`-packed`) or unquantized in the packed cache (`-unquantized`),
and a model with an image in its prompt. Columns are tests. `none` must give the stock model's results. `int8` must give
the results of a run without splits, moves or copies. `REFUSED` has the refusals of a row with their words. The
reference computes everything, and the last test compares kernels with it.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import DEVICE
from refusals import refused
from small_types import PACKED, WINDOW, in_packed_cache, tiny
from test_vision_types import prompt as with_image
from test_vision_types import tiny as tiny_vision
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer.window_layer import WindowLayer

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore:nothing is packed")]

VISION = "mistral3"
PADDING, NEW = 11, 5
MORE, OTHER = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(4)).split([3, 5], 1)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
CLOSE = {"rtol": 0, "atol": 2e-5}  # fp32 sums in another order, as of experts, who add up tokens in the order of rows


class Row(NamedTuple):
    """A type and its windows: `exact`, `packed`, or `unquantized` in the packed cache."""

    model_type: str
    sliding: str = "exact"

    def __str__(self) -> str:
        return self.model_type + ("" if self.sliding == "exact" else f"-{self.sliding}")

    @property
    def tokens(self) -> int:
        """Length of the prompt: past a window and past a block; of packed windows past the 384 tokens for which their
        layers have room, so that the first blocks are gone."""
        return 80 if self.sliding == "exact" else 400

    def model(self, **changes: Any) -> PreTrainedModel:
        """The stock model, the same at every call."""
        model = (tiny_vision if self.model_type == VISION else tiny)(self.model_type, **changes)
        model.generation_config.eos_token_id = None
        return model

    def patched(self, method: str = "none", **settings: Any) -> PreTrainedModel:
        return patched(self, self.model(), method, **settings)

    def prompt(self, rows: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
        """Arguments of a call with the prompt, unpadded."""
        if self.model_type == VISION:
            inputs = with_image(VISION, self.tokens)
            del inputs["attention_mask"]
        else:
            inputs = {"input_ids": torch.randint(3, 90, (2, self.tokens), generator=torch.Generator().manual_seed(3))}
        return {name: x[[*rows]] for name, x in inputs.items()}

    def mask(self, more: int = 0) -> torch.Tensor:
        """Mask of the prompt and `more` tokens, with padding on the left of the second row."""
        mask = torch.ones(2, self.tokens + more, dtype=torch.int64)
        mask[1, :PADDING] = 0
        return mask


def patched(row: Row, model: PreTrainedModel, method: str, **settings: Any) -> PreTrainedModel:
    windows = "packed" if row.sliding == "packed" else "exact"
    how = {"impl": "reference", "family": False, "sliding": windows, "crop_horizon": 32, **settings}
    return patch(model, method, **how)


# whose windows can be packed
WINDOWED = ["gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "mistral", "phi3"]
ROWS = [*map(Row, PACKED), *(Row(name, "packed") for name in (*WINDOWED, "llama4_text")), Row(VISION)]
ROWS += [Row("gemma3_text", "unquantized")]

OWN = "unpacked layers"
OF_WINDOW: dict[str, tuple[str, ...]] = {
    "crop": ("cannot crop 5 columns", f"sliding window of {WINDOW}", "Start from a fresh cache"),
    "compile": (OWN, f"sliding window of {WINDOW}"),
}
OF_CHUNK: dict[str, tuple[str, ...]] = {
    "crop": ("cannot crop 5 columns", f"attention in chunks of {WINDOW}", "Start from a fresh cache"),
    "compile": (OWN, f"attention in chunks of {WINDOW}"),
}
OF_STATE: dict[str, tuple[str, ...]] = {
    "crop": ("cannot crop 5 columns", "linear attention or", "earlier state is gone", "Start from a fresh cache"),
    "lookup": ("assisted generation is not supported with stateful models",),
    "compile": (OWN, "linear attention or SSM"),
}
OF_CONVOLUTION: dict[str, tuple[str, ...]] = {
    "crop": ("cannot crop 5 columns", "convolution", "Start from a fresh cache"),
    "compile": (OWN, "convolution"),
}
# Row and column, and parts of the message. `crop`: past the window; assisted generation records what it takes back.
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(WINDOWED, OF_WINDOW),
    "llama4_text": OF_CHUNK,
    **dict.fromkeys(["qwen3_next", "qwen3_5_text", "granitemoehybrid", "falcon_h1"], OF_STATE),
    "lfm2_moe": OF_CONVOLUTION,
}

rows = pytest.mark.parametrize("row", ROWS, ids=str)
methods = pytest.mark.parametrize("method", ["none", "int8"])


@pytest.fixture(autouse=True)
def home_of_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the windows of rows `-unquantized` in the packed cache, as a GPU does. There the reference does too."""
    row = request.node.callspec.params.get("row") if hasattr(request.node, "callspec") else None
    on_gpu = DEVICE == "cuda" and request.node.get_closest_marker("gpu") is not None
    if row is not None and (row.sliding == "unquantized" or on_gpu):
        in_packed_cache(monkeypatch)


@contextlib.contextmanager
def asked(row: Row, column: str) -> Iterator[None]:
    """Context for a test of a row. If `REFUSED` has an entry for it, the test must be refused with those words."""
    words = REFUSED.get(str(row), {}).get(column)
    if words is None:
        yield
        return
    with pytest.raises((UnsupportedError, ValueError)) as caught:
        yield
    assert [part for part in words if part not in str(caught.value)] == [], caught.value


def stock_logits(row: Row) -> torch.Tensor:
    """Return the stock model's logits of `MORE` after the prompt, without a cache."""
    inputs = row.prompt()
    inputs["input_ids"] = torch.cat([inputs["input_ids"], MORE], 1)
    return row.model()(**inputs, use_cache=False).logits[:, -MORE.shape[1] :]


def after(model: PreTrainedModel, cache: Cache, ids: torch.Tensor = MORE) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


def check_unchanged(row: Row, method: str, change: Callable[[PreTrainedModel, QAttnCache], QAttnCache]) -> None:
    """Check that a cache gives the same logits with and without `change`, which keeps its tokens."""
    model = row.patched(method)
    want = after(model, model(**row.prompt()).past_key_values)
    assert torch.equal(after(model, change(model, model(**row.prompt()).past_key_values)), want)
    if method == "none":
        torch.testing.assert_close(want, stock_logits(row), **CLOSE)


@methods
@rows
def test_padded_batch(row: Row, method: str):
    """Layers are packed as the table of types says, rows of a batch are as alone, `none` gives the stock tokens."""
    model, inputs = row.patched(method), row.prompt()
    out = model.generate(**inputs, attention_mask=row.mask(), return_dict_in_generate=True, **GREEDY)
    layers, packed = out.past_key_values.layers, out.past_key_values.packed
    windows = [isinstance(layer, WindowLayer) for layer in layers]
    own = PACKED.get(row.model_type, [True] * len(layers))
    assert [layer in packed for layer in layers] == [a or b for a, b in zip(own, windows, strict=True)]
    assert any(windows) == (row.sliding != "exact")
    for layer in packed:
        assert (layer.state["closed"] > 0).all()
        assert (layer.state["block_pos"][:, 0] > 0).all() == isinstance(layer, WindowLayer)
    for i in range(2):
        alone = row.prompt((i,))
        alone["input_ids"] = alone["input_ids"][:, PADDING * i :]
        assert torch.equal(out.sequences[i, -NEW:], model.generate(**alone, **GREEDY)[0, -NEW:])
    if method == "none":
        stock = row.model()
        assert torch.equal(out.sequences, stock.generate(**inputs, attention_mask=row.mask(), **GREEDY))
        assert torch.equal(unpatch(model)(**inputs).logits, stock(**inputs).logits)


@methods
@rows
def test_chunked_prefill(row: Row, method: str):
    """Later chunks read earlier ones from their codes, so `int8` is near full precision and not the uncut prompt."""
    model, inputs = row.patched(method), row.prompt()
    first, *parts = inputs.pop("input_ids").split(40, 1)
    cache = model(input_ids=first, **inputs).past_key_values
    for part in parts:
        after(model, cache, part)
    got, want = after(model, cache), stock_logits(row)
    if method == "int8":
        # a code errs by half of a 127th of a token's largest number at most, 1 % of a usual one; two layers
        assert (got - want).norm() < 0.02 * want.norm()
        return
    torch.testing.assert_close(got, want, **CLOSE)
    if row.model_type != VISION:  # transformers gives each chunk the whole image
        text = {**row.prompt(), "attention_mask": row.mask(), "prefill_chunk_size": 40, **GREEDY}
        assert torch.equal(model.generate(**text), row.model().generate(**text))


@methods
@rows
def test_second_turn(row: Row, method: str):
    """In a padded batch: of `none` as with the stock model, of `int8` as by the same calls, made one by one."""
    want = two_turns(row, row.model()) if method == "none" else by_hand(row, row.patched(method))
    assert torch.equal(two_turns(row, row.patched(method)), want)


def two_turns(row: Row, model: PreTrainedModel) -> torch.Tensor:
    first = model.generate(**row.prompt(), attention_mask=row.mask(), return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([first.sequences, OTHER], 1)
    mask = row.mask(longer.shape[1] - row.tokens)
    return model.generate(longer, attention_mask=mask, past_key_values=first.past_key_values, **GREEDY)


def by_hand(row: Row, model: PreTrainedModel) -> torch.Tensor:
    inputs = row.prompt()
    text, cache, seen = inputs.pop("input_ids"), None, 0
    for i in range(2 * NEW):
        if i == NEW:
            text = torch.cat([text, OTHER], 1)
        mask, part = row.mask(text.shape[1] - row.tokens), slice(seen, text.shape[1])
        where = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, part]}
        out = model(text[:, part], past_key_values=cache, **where, **inputs)
        inputs, cache, seen = {}, out.past_key_values, text.shape[1]
        text = torch.cat([text, out.logits[:, -1:].argmax(-1)], 1)
    return text


@methods
@rows
def test_beams(row: Row, method: str):
    """Each beam, fed alone through a fresh cache, has the score that beam search gave it: its rows moved rightly."""
    model, how = row.patched(method), {"num_return_sequences": 3, "output_scores": True, "length_penalty": 0.0}
    beams = model.generate(**row.prompt((0,)), num_beams=3, return_dict_in_generate=True, **how, **GREEDY)
    out, total = model(**row.prompt((0, 0, 0))), torch.zeros(3)
    for tokens in beams.sequences[:, row.tokens :].T:
        total += out.logits[:, -1].log_softmax(-1)[torch.arange(3), tokens]
        out = model(tokens[:, None], past_key_values=out.past_key_values)
    assert len({tuple(beam) for beam in beams.sequences.tolist()}) == 3
    torch.testing.assert_close(total, beams.sequences_scores, rtol=0, atol=1e-4)  # five sums in fp32
    if method == "none":
        want, got = (each.generate(**row.prompt(), num_beams=2, **GREEDY) for each in (row.model(), model))
        assert torch.equal(got, want)


@methods
@rows
def test_lookup(row: Row, method: str):
    """Drafts from a repetitive prompt. Most are rejected."""
    model, inputs, calls = row.patched(method), row.prompt((0,)), list[int]()
    again = [inputs["input_ids"], *[inputs["input_ids"][:, 25:40]] * 4]
    inputs["input_ids"] = torch.cat(again, 1)
    want = (row.model() if method == "none" else model).generate(**inputs, **GREEDY)
    model.get_decoder().register_forward_hook(lambda module, args, out: calls.append(out[0].shape[1]))
    with asked(row, "lookup"):
        assert torch.equal(model.generate(**inputs, prompt_lookup_num_tokens=4, **GREEDY), want)
        assert 1 < max(calls[1:]) <= 5


@pytest.mark.product("gemma2-packed-int8")
@methods
@rows
def test_crop(row: Row, method: str):
    def there_and_back(model: PreTrainedModel, cache: QAttnCache) -> QAttnCache:
        after(model, cache, OTHER)
        cache.crop(-OTHER.shape[1])
        return cache

    with asked(row, "crop"):
        check_unchanged(row, method, there_and_back)


@methods
@rows
def test_reorder_repeat_and_select(row: Row, method: str):
    model = row.patched(method)
    cache = model(**row.prompt()).past_key_values
    want = after(model, copy.deepcopy(cache))
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(after(model, swapped, MORE[[1, 0]]), want[[1, 0]], **CLOSE)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    for wrong in (lambda: cache.reorder_cache(torch.tensor([0, 1, 3])), lambda: cache.batch_select_indices([5])):
        refused(wrong, QAttnError, "Nothing was changed")
    torch.testing.assert_close(after(model, cache, MORE[[1, 0, 0]]), want[[1, 0, 0]], **CLOSE)
    if method == "none":
        torch.testing.assert_close(want, stock_logits(row), **CLOSE)


def pickled(cache: QAttnCache) -> QAttnCache:
    return pickle.loads(pickle.dumps(cache))


@methods
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@rows
def test_copies(row: Row, copied: Callable[[QAttnCache], QAttnCache], method: str):
    """Copies are independent of the original cache."""

    def change(model: PreTrainedModel, cache: QAttnCache) -> QAttnCache:
        other = copied(cache)
        after(model, cache, OTHER)
        cache.reset()
        return other

    check_unchanged(row, method, change)


@pytest.mark.slow
@pytest.mark.product("mistral-packed")
@rows
def test_compiled_steps(row: Row):
    """Steps compile to one graph. `patch` refuses models with unpacked layers."""
    with asked(row, "compile"):
        model = row.patched("int8", decode="compile")
        torch._dynamo.utils.counters.clear()
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        caches = [QAttnCache.for_model(model, max_cache_len=row.tokens + 20) for _ in range(2)]
        for cache in caches:
            model(**row.prompt(), past_key_values=cache)
        for token in MORE.split(1, 1):
            want, got = (call(token, past_key_values=x).logits for call, x in zip((model, step), caches, strict=True))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # blocks lie elsewhere: sums in another order
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


WINDOWS = [(name, window) for window in (1, 63, 64, 65) for name in WINDOWED] + [("mistral", 4096)]


@pytest.mark.product("mistral-64")
@pytest.mark.parametrize(("model_type", "window"), WINDOWS)
def test_windows(model_type: str, window: int):
    """Windows left to the model and packed windows give the stock model's tokens, past the window in the prompt and in
    steps.

    For a window of one token, a `DynamicCache` of transformers 5.23 keeps all tokens (`keys[:, :, -0:]`). Its steps
    then differ from the model without a cache, and packed layers agree with the latter.
    """
    sizes = {"sliding_window": window, "max_position_embeddings": 8192}
    ids = torch.randint(3, 90, (1, max(400, window + 10)), generator=torch.Generator().manual_seed(3))
    stock = tiny(model_type, **sizes)
    for sliding in ("exact", "packed"):
        model = patched(Row(model_type, sliding), tiny(model_type, **sizes), "none")
        got = model.generate(ids, return_dict_in_generate=True, **GREEDY)
        cached = window > 1 or sliding == "exact"
        assert torch.equal(got.sequences, stock.generate(ids, use_cache=cached, **GREEDY))
        first = got.past_key_values.layers[0]
        assert isinstance(first, WindowLayer) == (sliding == "packed")
        assert sliding == "exact" or first.capacity < 1.25 * window + 400


# Kernels know head dims from 64 on, and latents of these sizes
OF_KERNELS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
SIZES: dict[str, dict[str, Any]] = {
    "gemma4_text": {**OF_KERNELS, "global_head_dim": 64},
    "granitemoehybrid": {**OF_KERNELS, "mamba_n_heads": 16},
    "deepseek_v3": {},
}
# The interpreter is slow, so one row of each kind: unpacked windows, packed windows with learned sinks, chunks, linear
# attention in separate layers and together with attention, latents, and an image.
KINDS = ["gemma2", "gpt_oss-packed", "llama4_text", "qwen3_next", "falcon_h1", "deepseek_v3", VISION]


KERNEL_ROWS = [row for row in ROWS if str(row) in KINDS or (DEVICE == "cuda" and str(row) not in ("mistral", "phi3"))]


@pytest.mark.gpu
@pytest.mark.product("gemma2")
@pytest.mark.parametrize("row", KERNEL_ROWS, ids=str)
def test_kernels(row: Row):
    """A cache that is read in chunks, repeated, copied, cropped and continued stays close to the reference."""
    got, want = (history(row, impl) for impl in ("triton", "reference"))
    assert 0 < (got - want).norm() < 0.03 * want.norm()  # kernels round queries and weights to 8 bits in their own way


def history(row: Row, impl: str) -> torch.Tensor:
    """Return the logits of the calls after a prompt."""
    model = patched(row, row.model(**SIZES.get(row.model_type, OF_KERNELS)).to(DEVICE), "int8", impl=impl)
    inputs = {name: x.to(DEVICE) for name, x in row._replace(sliding="exact").prompt((0,)).items()}
    first, second = inputs.pop("input_ids").split(40, 1)
    cache = model(first, **inputs).past_key_values
    found = [after(model, cache, second)]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([1])
    cache = pickled(copy.deepcopy(cache))
    found.append(after(model, cache, OTHER[:1].to(DEVICE)))
    kept = any(isinstance(layer, WindowLayer) for layer in cache.layers)
    with contextlib.nullcontext() if kept else asked(row, "crop"):
        cache.crop(-OTHER.shape[1])
    found.append(after(model, cache, OTHER[1:].to(DEVICE)))
    return torch.cat(found, 1)
