"""Saved caches: a loaded one goes on as the one that was saved, its file serves many, and a wrong file is an error."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import as_on_a_gpu
from helpers import Case, case_id, cases, random_ids, tiny_llama
from safetensors import safe_open
from safetensors.torch import save_file
from small_types import PACKED, tiny
from transformers import PreTrainedModel

from qattn_hf import QAttnCache, QAttnError, UnsupportedError, patch, release, report, unpatch
from qattn_hf.saved import read_header
from qattn_hf.saved.writer import identity, layer_devices

pytestmark = pytest.mark.usefixtures("no_grad")

PREFIX, QUESTION = random_ids(2, 150), random_ids(2, 9, seed=2)
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def answers(model: PreTrainedModel, cache: QAttnCache | None, rows: int = 2) -> torch.Tensor:
    """Return the logits of the answer that `generate` gives to a question after the prefix."""
    ids = torch.cat([PREFIX, QUESTION], 1)[:rows]
    out = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **GREEDY)
    return torch.stack(out.logits)


@pytest.fixture
def model() -> PreTrainedModel:
    return patch(tiny_llama(), "turbo")


@pytest.fixture
def path(model: PreTrainedModel, tmp_path: Path) -> Path:
    """A file with the prefix, of `model`."""
    model(PREFIX).past_key_values.save(tmp_path / "prefix.safetensors", input_ids=PREFIX)
    return tmp_path / "prefix.safetensors"


def arenas(cache: QAttnCache) -> list[int]:
    return [layer.arena.data_ptr() for layer in cache.packed]


@pytest.mark.product
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_a_loaded_prefix_goes_on_as_the_one_that_was_saved(case: Case, tmp_path: Path):
    model = patch(tiny_llama(), case[0], **case[1])
    cache = model(PREFIX).past_key_values
    cache.save(tmp_path / "prefix")
    want = answers(model, copy.deepcopy(cache))
    loaded = QAttnCache.load(tmp_path / "prefix", model=model)
    assert torch.equal(answers(model, loaded), want)


@pytest.mark.product
@pytest.mark.parametrize("family", PACKED)
def test_layers_that_are_the_models_own_are_saved_too(family: str, tmp_path: Path):
    model = patch(tiny(family), "turbo", impl="reference", family=False)
    cache = model(PREFIX).past_key_values
    cache.save(tmp_path / "prefix")
    want = answers(model, cache)
    first, second = (QAttnCache.load(tmp_path / "prefix", model=model) for _ in range(2))
    twin = copy.deepcopy(second)
    for loaded in (first, second, twin):  # what one writes the others do not see
        assert torch.equal(answers(model, loaded), want)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [150, 15])
def test_packed_windows_are_saved_too(prefix: int, tmp_path: Path):
    model = patch(tiny("gemma2"), "turbo", impl="reference", family=False, sliding="packed")
    cache = model(PREFIX[:, :prefix]).past_key_values
    cache.save(tmp_path / "prefix")
    loaded = QAttnCache.load(tmp_path / "prefix", model=model)
    twin = copy.deepcopy(loaded)
    for call in ([QUESTION[:, :1]] * 3, [random_ids(2, 300, seed=4), QUESTION], [QUESTION] * 12):  # short, long, many
        want, got, other = (
            [model(ids, past_key_values=held).logits for ids in call]
            for held in (copy.deepcopy(cache), copy.deepcopy(loaded), copy.deepcopy(twin))
        )
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, other, strict=True))


def test_the_file_is_mapped_until_it_is_written(model, path):
    data = path.read_bytes()
    cache = QAttnCache.load(path, model=model)
    twin, other = copy.deepcopy(cache), copy.deepcopy(cache)
    assert arenas(cache) == arenas(twin) == arenas(other) and cache.layers[0].borrowed
    got = answers(model, twin)
    assert not set(arenas(twin)) & set(arenas(cache)) and arenas(cache) == arenas(other)
    for written in (cache, other):
        assert torch.equal(answers(model, written), got)
    assert path.read_bytes() == data


WRITES: dict[str, Callable[[QAttnCache], Any]] = {
    "crop": lambda cache: cache.crop(-20),
    "far crop": lambda cache: cache.crop(-100),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices([1]),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "horizon": lambda cache: cache.raise_horizon(200),
    "plan": lambda cache: cache.plan(1000),
}


@pytest.mark.parametrize("write", WRITES)
def test_each_write_has_its_own_copy(model, path, write):
    want = model(PREFIX).past_key_values
    cache = QAttnCache.load(path, model=model)
    twin = copy.deepcopy(cache)
    before = [layer.arena.clone() for layer in twin.layers]
    for changed in (cache, want):
        WRITES[write](changed)
    assert all(torch.equal(layer.arena, old) for layer, old in zip(twin.layers, before, strict=True))
    ids = random_ids(cache.layers[0].batch, 70, seed=3)
    assert torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=want).logits)
    assert torch.equal(answers(model, twin), answers(model, QAttnCache.load(path, model=model)))


def test_a_second_turn_and_a_second_file(model, path, tmp_path):
    whole = model(PREFIX).past_key_values
    cache = QAttnCache.load(path, model=model)
    for held in (whole, cache):
        model(QUESTION, past_key_values=held)
    cache.save(tmp_path / "two")
    cache.save(path)  # over the file that it came from
    for again in (QAttnCache.load(tmp_path / "two", model), QAttnCache.load(path, model)):
        assert int(again.get_seq_length()) == 159
        more = random_ids(2, 40, seed=5)
        got = model(more, past_key_values=again).logits
        assert torch.equal(got, model(more, past_key_values=copy.deepcopy(whole)).logits)


def test_a_loaded_cache_is_saved_before_any_call(model, path, tmp_path):
    QAttnCache.load(path, model=model).save(tmp_path / "twin", input_ids=PREFIX)
    assert read_header(tmp_path / "twin") == read_header(path)  # digests of all tensors among it


def test_a_prefix_of_a_padded_batch(model, tmp_path):
    mask = torch.ones_like(PREFIX)
    mask[1, :40] = 0
    cache = model(PREFIX, attention_mask=mask).past_key_values
    cache.save(tmp_path / "prefix")
    loaded = QAttnCache.load(tmp_path / "prefix", model=model)
    mask = torch.cat([mask, torch.ones_like(QUESTION)], 1)
    got, want = (model(QUESTION, attention_mask=mask, past_key_values=held).logits for held in (loaded, cache))
    assert torch.equal(got, want)


def test_captured_steps_over_a_loaded_cache(fake, tmp_path):
    model = patch(as_on_a_gpu(tiny_llama()), "turbo")
    cache = model(PREFIX).past_key_values
    cache.save(tmp_path / "prefix")
    want = answers(model, cache)
    first = QAttnCache.load(tmp_path / "prefix", model=model)
    second = copy.deepcopy(first)
    for loaded in (first, second):
        assert torch.equal(answers(model, loaded), want) and loaded.decode == "graph"


@pytest.mark.slow
def test_a_compiled_call_copies_first(model, path):
    cache = QAttnCache.load(path, model=model)
    twin = copy.deepcopy(cache)
    before = [layer.arena.clone() for layer in twin.layers]
    torch.compile(model, backend="eager")(QUESTION, past_key_values=cache)
    assert all(torch.equal(layer.arena, old) for layer, old in zip(twin.layers, before, strict=True))
    assert not set(arenas(cache)) & set(arenas(twin))


def test_spare_room_is_not_saved(model, path, tmp_path):
    cache = QAttnCache.for_model(model, max_cache_len=8192)
    model(PREFIX, past_key_values=cache)
    cache.save(tmp_path / "large", input_ids=PREFIX)
    assert (tmp_path / "large").stat().st_size == path.stat().st_size
    loaded = QAttnCache.load(path, model=model)
    assert loaded.layers[0].capacity == 192 and torch.equal(loaded.input_ids, PREFIX)
    held, full = (report(x).to_dict() for x in (loaded, cache))
    assert held["kv_bytes"] == sum(t.nbytes for t, _ in loaded.state_tensors().values()) < full["kv_bytes"]
    assert held["packed_tokens"] == full["packed_tokens"]


def test_a_pickle_of_a_loaded_layer_is_not_the_file(model, path):
    cache = QAttnCache.load(path, model=model)
    assert len(pickle.dumps(cache.layers[0])) < 1.1 * cache.layers[0].arena.nbytes + 10_000
    twin = pickle.loads(pickle.dumps(cache))
    with pytest.raises(QAttnError, match="from a pickle"):
        twin.save(path)
    assert torch.equal(answers(model, twin), answers(model, cache))


def test_release_and_another_patch_leave_a_loaded_cache(model, path):
    cache = QAttnCache.load(path, model=model)
    release(model)
    patch(unpatch(model), "turbo")
    assert torch.equal(answers(model, cache), answers(model, QAttnCache.load(path, model=model)))


def test_load_is_on_no_report(model, path):
    QAttnCache.load(path, model=model)
    assert report(model).to_dict()["packed_tokens"] == 2 * 128  # of the cache that wrote the file
    other = patch(tiny_llama(), "turbo")
    QAttnCache.load(path, model=other)
    assert report(other).to_dict()["packed_tokens"] == 0


def test_a_ring_that_was_enlarged_is_kept(model, tmp_path):
    cache = model(PREFIX).past_key_values
    cache.raise_horizon(100)
    cache.save(tmp_path / "prefix")
    loaded = QAttnCache.load(tmp_path / "prefix", model=model)
    for held in (cache, loaded):
        held.crop(-90)
    assert torch.equal(model(QUESTION, past_key_values=loaded).logits, model(QUESTION, past_key_values=cache).logits)


# What is not saved


def test_a_cache_that_cannot_be_told_is_not_saved(model, tmp_path):
    fresh = QAttnCache.for_model(model)
    cache = model(PREFIX).past_key_values
    for held, said, ids in (
        (fresh, "made no call", None),
        (cache, r"\(2, 3\).*\(2, 150\)", PREFIX[:, :3]),
    ):
        with pytest.raises(QAttnError, match=said):
            held.save(tmp_path / "prefix", input_ids=ids)
    cache.reset()
    with pytest.raises(QAttnError, match="no tokens"):
        cache.save(tmp_path / "prefix")
    other = patch(tiny_llama(), "turbo")
    cache = other(PREFIX).past_key_values
    del other
    gc.collect()
    with pytest.raises(QAttnError, match="freed"):
        cache.save(tmp_path / "prefix")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_cache_is_not_saved(model, tmp_path):
    cache = model(PREFIX).past_key_values
    cache.layers[0].torn = True  # by a call that cannot be taken back
    with pytest.raises(UnsupportedError, match="interrupted"):
        cache.save(tmp_path / "prefix")
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_as_it_was(model, path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr("qattn_hf.saved.header.save_file", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(QUESTION).past_key_values.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# What is not loaded


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> None:
    """The file with another header or other tensors, and a SHA-256 of the header that fits."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["qattn"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    change(header, tensors)
    text = json.dumps(header)
    save_file(tensors, path, {"qattn": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


FAULTS: dict[str, tuple[Callable[[dict, dict], Any], str]] = {
    "format": (lambda header, _: header.update(format=1), "has format 1.*Save the cache anew"),
    "layout": (lambda header, _: header["layers"][1].update(places="0" * 64), "another layout"),
    "tensor missing": (lambda _, tensors: tensors.pop("1.arena"), "list of its tensors"),
    "tensor too many": (lambda _, tensors: tensors.update(x=torch.zeros(1)), "list of its tensors"),
    "tensor altered": (lambda _, tensors: tensors["0.arena"][-200:].add_(1), r"altered.*0\.arena"),
    "tokens altered": (lambda _, tensors: tensors["input_ids"].add_(1), "altered.*input_ids"),
    "layer missing": (lambda header, _: header["layers"].pop(), "1 layers and the model 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_file_is_refused(model, path, fault):
    change, said = FAULTS[fault]
    rewritten(path, change)
    with pytest.raises(QAttnError, match=said):
        QAttnCache.load(path, model=model)


def test_no_part_and_no_flipped_bit_is_loaded(model, path):
    data = path.read_bytes()
    QAttnCache.load(path, model=model)
    for size in (0, 4, 8, 500, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(QAttnError, match="prefix"):
            QAttnCache.load(path, model=model)
    end = 8 + int.from_bytes(data[:8], "little")  # of the header, beyond which are the tensors
    for place in [*range(0, 8), *range(8, end, 61), *range(end, len(data), len(data) // 20), len(data) - 1]:
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(QAttnError, match="prefix"):
            QAttnCache.load(path, model=model)


def test_files_of_others_are_refused(model, tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "x")
    with pytest.raises(QAttnError, match=r"not written by QAttnCache\.save"):
        QAttnCache.load(tmp_path / "x", model=model)
    with pytest.raises(FileNotFoundError):
        QAttnCache.load(tmp_path / "y", model=model)


def other_weights() -> PreTrainedModel:
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    return other


OTHERS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "weights": (other_weights, "same config with other weights"),
    "layers": (lambda: tiny_llama(num_hidden_layers=3), "2 layers and the model 3"),
    "position": (
        lambda: tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "rope_parameters .*10000.* there and .*500000.* here",
    ),
    "dtype": (lambda: tiny_llama().to(torch.bfloat16), "was float32 and is bfloat16 here: load it with dtype=float32"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused(path, other):
    make, said = OTHERS[other]
    with pytest.raises(UnsupportedError, match=said):
        QAttnCache.load(path, model=patch(make(), "turbo"))


@pytest.mark.parametrize(
    "case", [("kivi", {}), ("turbo", {"v_bits": 2}), ("turbo", {"layers": {1: {"bits": 2}}})], ids=case_id
)
def test_another_recipe_is_refused(path, case):
    model = patch(tiny_llama(), case[0], **case[1])
    with pytest.raises(UnsupportedError, match=rf"saved by \{{method: turbo\}}.*patched with \{{method: {case[0]}"):
        QAttnCache.load(path, model=model)


def test_a_model_that_is_not_patched_is_refused(path):
    with pytest.raises(UnsupportedError, match="not patched"):
        QAttnCache.load(path, model=tiny_llama())


def test_heads_serve_the_same_decoder(model, path):
    """What the cache holds is the decoder's: the model and its decoder alone load each other's files."""
    held = QAttnCache.load(path, model=model)
    model.model(QUESTION, past_key_values=held)
    held.save(path)
    assert int(QAttnCache.load(path, model=model).get_seq_length()) == 159


def test_a_split_model_is_refused(model, path, monkeypatch):
    monkeypatch.setattr("qattn_hf.saved.shard_of", lambda model: object())
    for call in (lambda: QAttnCache.load(path, model=model), lambda: model(PREFIX).past_key_values.save(path)):
        with pytest.raises(UnsupportedError, match="tensor parallelism"):
            call()


def test_a_model_that_moved_is_refused(model, path, monkeypatch):
    monkeypatch.setattr(model._qattn, "device_type", "cuda")
    with pytest.raises(UnsupportedError, match=r"patched for cuda and runs on cpu; patch it again"):
        QAttnCache.load(path, model=model)


def test_each_layer_is_loaded_to_its_device():
    split = tiny_llama()
    split.model.layers[1].to("meta")
    assert [device.type for device in layer_devices(split, 2)] == ["cpu", "meta"]
    with pytest.raises(UnsupportedError, match=r"layers\.1\..* is offloaded"):
        identity(split)


def test_verify_false_reads_no_digest(model, path):
    rewritten(path, FAULTS["tokens altered"][0])
    loaded = QAttnCache.load(path, model=model, verify=False)
    assert torch.equal(answers(model, loaded), answers(model, model(PREFIX).past_key_values))
