"""Edits of a cache that fail: repeating the edit, or a step, gives the result without the failure, or is refused.

The first tier fails at some places. `test_at_every_place` fails at each allocation, and at each line that an edit runs,
the first and the last time. With `QATTN_FAULTS=every` it does so for each kind of cache, which takes half an hour.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.cache_utils
from failing import Failing, Interrupted
from helpers import case_id, random_ids, tiny_llama
from small_types import tiny
from test_faults import CASES, EVERY
from transformers import MistralConfig, MistralForCausalLM

import qattn_hf
import qattn_kernels
from qattn_hf import CapacityError, QAttnCache, QAttnError, patch
from qattn_hf.layer.snapshot import Snapshot
from qattn_hf.model._compat import VERSION

pytestmark = pytest.mark.usefixtures("no_grad")

MEMORY = 150_000  # bytes: so few that the first block of each row has fewer bits
IDS, ROWS = random_ids(2, 150), torch.tensor([1, 1])
# edits of layers and caches, and functions of the reference that edit state tensors
HOST = (
    "cache/cache", "cache/interrupted", "layer/layer", "layer/arena_holder", "layer/changes", "layer/rollback",
    "layer/snapshot", "layer/model_layer", "layer/hybrid_layer", "layer/window_layer", "layer/budget_layer",
    "layer/latent_layer", "saved/__init__",
)  # fmt: skip
KERNELS = ("ops/crop/reference", "ops/crop/ring", "ops/reorder/reference", "ops/sink_pool/table", "formats/base",
           "ops/repack/reference", "layer/arena", "layout")  # fmt: skip
FILES = {
    *(str(Path(qattn_hf.__path__[0], f"{name}.py")) for name in HOST),
    *(str(Path(qattn_kernels.__path__[0], f"{name}.py")) for name in KERNELS),
    str(transformers.cache_utils.__file__),
}
assert all(Path(name).is_file() for name in FILES), "a file moved, and nothing would interrupt it"
Edit = Callable[[QAttnCache, Any, Path], Any]
EDITS: dict[str, Edit] = {
    "crop": lambda cache, *_: cache.crop(-30),
    "crop to a length": lambda cache, *_: cache.crop(121),
    "crop far": lambda cache, *_: cache.crop(-100),
    "crop all": lambda cache, *_: cache.crop(-200),
    "reorder": lambda cache, *_: cache.reorder_cache(ROWS),
    "repeat": lambda cache, *_: cache.batch_repeat_interleave(2),
    "select": lambda cache, *_: cache.batch_select_indices(ROWS[:1]),
    "horizon": lambda cache, *_: cache.raise_horizon(200),
    "grow": lambda cache, *_: cache.plan(600),
    "reset": lambda cache, *_: cache.reset(),
    "save": lambda cache, _, folder: cache.save(folder / "saved"),
    "load": lambda _, model, folder: QAttnCache.load(folder / "prefix", model),
    "copy": lambda cache, *_: copy.deepcopy(cache),
}
FAULTS: dict[str, Callable[[int], Any]] = {
    "memory": lambda at: Failing(at, torch.OutOfMemoryError),
    "interrupt": lambda at: Interrupted(at, FILES),
}


def mistral(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model: Any = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=48)).eval()
    return patch(model, "turbo", sliding="packed", crop_horizon=64, **settings)


def of_type(name: str) -> Any:
    return patch(tiny(name), "turbo", sliding="exact", family=False)


MODELS: dict[str, Callable[[], Any]] = {
    **{case_id(case): (lambda case=case: patch(tiny_llama(), case[0], impl="reference", **case[1])) for case in CASES},
    "packed windows": mistral,
    "own windows": lambda: of_type("gemma3_text"),
    "linear": lambda: of_type("qwen3_5_text"),
    "hybrid": lambda: of_type("falcon_h1"),
    "latent": lambda: of_type("deepseek_v3"),
    "memory": lambda: patch(tiny_llama(), "turbo", memory=MEMORY),
}


class Played:
    """One edit of one cache, played at one fault after another.

    Attributes:
        outcomes: how often what followed a fault was `right` or `refused`; each fault counts twice.
        wrong: what followed otherwise.
    """

    def __init__(self, model: Any, edit: str, folder: Path):
        self.model, self.edit, self.folder = model, EDITS[edit], folder
        self.cache = QAttnCache.for_model(model)
        if VERSION >= (5, 23):  # before, a window that records its past has masks of another width
            self.cache.activate_past_recording()  # so that unpacked windows can be cropped
        model(IDS, past_key_values=self.cache)
        model(IDS[:, :1], past_key_values=self.cache)
        if edit == "load":
            self.cache.save(folder / "prefix")
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.before = self.step(copy.deepcopy(self.cache))
        self.after = self.again(copy.deepcopy(self.cache))

    def step(self, cache: QAttnCache) -> torch.Tensor:
        batch = cache.packed[0].batch
        ids = IDS[:1, 1:2].expand(2 if batch is None else batch, 1)
        return self.model(ids, past_key_values=cache).logits

    def again(self, cache: QAttnCache) -> torch.Tensor:
        made = self.edit(cache, self.model, self.folder)
        return self.step(made if isinstance(made, QAttnCache) else cache)

    def places(self, fault: str) -> list[int]:
        """Numbers of the allocations, or of the lines, the first and the last time each."""
        with FAULTS[fault](0) as counted:
            self.edit(copy.deepcopy(self.cache), self.model, self.folder)
        if isinstance(counted, Interrupted):
            return sorted({at for both in counted.seen.values() for at in both})
        return list(range(1, counted.count + 1))

    def fail(self, fault: str, at: int) -> None:
        """Fail at one place, and compare what follows."""
        cache, failing = copy.deepcopy(self.cache), FAULTS[fault](at)
        try:
            with failing:
                self.edit(cache, self.model, self.folder)
        except BaseException as error:
            if failing.count < at:
                raise
            raised = error  # torch and safetensors turn some into other errors
        else:
            assert failing.count < at  # the first time more is worked out than later
            return
        what = f"{fault} {at}: {raised}"
        self.goes_on(f"{what}, a step", copy.deepcopy(cache), self.step, self.before)
        self.goes_on(f"{what}, again", cache, self.again, self.after)
        self.outcomes["faults"] += 1

    def goes_on(self, what: str, cache: QAttnCache, call: Any, want: torch.Tensor) -> None:
        try:
            right = torch.equal(call(cache), want)
        except (QAttnError, CapacityError):  # only an empty cache is of use then
            cache.reset()
            self.outcomes["refused"] += 1
            right = bool(self.model(IDS[:, :9], past_key_values=cache).logits.isfinite().all())
        else:
            self.outcomes["right"] += right
        if not right:
            self.wrong.append(what)


def play(kind: str, edit: str, fault: str, folder: Path, most: int | None = None) -> Counter[str]:
    """Fail at all places of an edit, or at `most` of them."""
    try:
        played = Played(MODELS[kind](), edit, folder)
    except (QAttnError, CapacityError):  # linear attention is not cropped; a memory budget saves and grows less
        return Counter()
    places = played.places(fault)
    for at in places[:: -(-len(places) // most)] if most and places else places:
        played.fail(fault, at)
    assert played.wrong == []
    assert played.outcomes["right"] + played.outcomes["refused"] == 2 * played.outcomes["faults"]
    return played.outcomes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_fails_is_taken_back_or_refused(edit: str, fault: str, tmp_path: Path):
    outcomes = play("turbo", edit, fault, tmp_path, 6)
    assert outcomes["faults"] or (fault == "memory" and edit in ("reset", "crop all"))  # which allocate nothing
    if edit not in ("crop all", "reorder", "reset"):  # these keep nothing
        assert not outcomes["refused"]


@pytest.mark.parametrize("edit", ["crop", "select", "reorder"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "turbo"])
def test_each_kind_of_cache(kind: str, edit: str, tmp_path: Path):
    outcomes = play(kind, edit, "interrupt", tmp_path, 6)
    uncropped = ("linear", "hybrid", *(["own windows"] if VERSION < (5, 23) else []))
    assert outcomes["faults"] or (edit == "crop" and kind in uncropped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_at_every_place(kind: str, tmp_path: Path):
    if kind != "turbo" and not EVERY:
        pytest.skip("QATTN_FAULTS=every plays each kind of cache")
    total: Counter[str] = Counter()
    for edit in EDITS:
        for fault in FAULTS:
            outcomes = play(kind, edit, fault, tmp_path)
            print(f"{kind}, {edit}, {fault}: {dict(outcomes)}")
            total += outcomes
    print(f"{kind}: {dict(total)}, none wrong")
    assert total["faults"] >= 500


@pytest.mark.parametrize("edit", ["crop", "crop all", "reorder", "reset"])
def test_a_file_that_a_cache_maps_is_never_written(edit: str, tmp_path: Path):
    """Edits of a loaded cache copy the mapped bytes first, and a failed edit is not put back into the file."""
    played = Played(MODELS["turbo"](), "load", tmp_path)
    file = tmp_path / "prefix"
    written = file.read_bytes()
    for at in (1, 2, 5, 25, 60, 120, 180):
        cache = QAttnCache.load(file, played.model)
        try:
            with Interrupted(at, FILES):
                EDITS[edit](cache, played.model, tmp_path)
        except KeyboardInterrupt:
            played.goes_on(f"{edit} {at}", cache, played.step, played.before)
    assert played.wrong == [] and played.outcomes["right"] > 0
    assert file.read_bytes() == written


@pytest.mark.slow
@pytest.mark.parametrize("what", ["crop", "step"])
def test_an_interrupt_while_a_cache_is_put_back(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C twice: during a crop or a step, and at each line that puts the cache back."""
    played, at, again = Played(MODELS["turbo"](), "crop", tmp_path), 1, True
    with Interrupted(0, FILES) as counted:
        copy.deepcopy(played.cache).crop(-30)

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    while again:
        cache = copy.deepcopy(played.cache)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Snapshot, "put_back", broken)
            if what == "crop":
                with Interrupted(counted.count * 3 // 4, FILES):  # in the second layer
                    cache.crop(-30)
            else:
                patched.setattr(played.model.model.layers[0].mlp, "forward", broken)
                played.step(cache)
        assert len({layer.edits for layer in cache.layers}) == 2
        with contextlib.suppress(KeyboardInterrupt), Interrupted(at, FILES):
            cache.check_whole()
            again = False
        played.goes_on(f"{what}, again interrupted at line {at}", cache, played.step, played.before)
        at += 1 if EVERY else 5
    assert at > 15 and played.wrong == []
