"""What breaks inside of `generate`, and caches in wrong hands: the next call works, or says why it does not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from failing import Failing
from helpers import Case, case_id, random_ids, tiny_llama
from test_faults import CASES
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from qattn_hf import QAttnCache, UnsupportedError, patch, report

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = random_ids(2, 150)
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=8)


class Broken(Exception):
    pass


class After(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Raises when it is called for the third time, as whatever of `generate` it is passed as."""

    def __init__(self, error: type[BaseException]):
        self.error, self.calls = error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        scores = args[1]
        return scores if self.processes else torch.zeros(len(scores), dtype=torch.bool)

    processes = True

    def put(self, value: Any) -> None:
        self(None, value)

    def end(self) -> None:
        pass


def stopping(error: type[BaseException]) -> dict[str, Any]:
    criterion = After(error)
    criterion.processes = False
    return {"stopping_criteria": [criterion], "return_dict_in_generate": True, "output_scores": True}


BREAKING: dict[str, Callable[[type[BaseException]], dict[str, Any]]] = {
    "streamer": lambda error: {"streamer": After(error)},
    "processor": lambda error: {"logits_processor": [After(error)]},
    "criterion": stopping,
}


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("what", BREAKING)
def test_what_breaks_between_steps(what: str, error: type[BaseException]):
    """A cache that the caller passed is left after a whole step. A second try crops it back to the prompt."""
    model, ids = patch(tiny_llama(), "turbo"), IDS[:1]
    want = model.generate(ids, **GREEDY)
    cache = QAttnCache.for_model(model)
    for given in ({}, {"past_key_values": cache}):
        with pytest.raises(error):
            model.generate(ids, **given, **BREAKING[what](error), **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY), want)
    columns = {int(layer.get_seq_length()) for layer in cache.layers}
    assert len(columns) == 1 and 150 <= columns.pop() < 158
    cache.crop(149)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), want)


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_generate_that_fails_at_any_allocation(case: Case, error: type[BaseException]):
    model = patch(tiny_llama(), case[0], impl="reference", **case[1])
    want, start = model.generate(IDS, **GREEDY), model(IDS[:, :70]).past_key_values
    at, out = 20, None
    cache = copy.deepcopy(start)
    while out is None:
        try:
            with Failing(at, error):
                out = model.generate(IDS, past_key_values=cache, **GREEDY)
        except error:
            at += 397
            cache.check_whole()
            (columns,) = {int(layer.get_seq_length()) for layer in cache.layers}
            assert columns in (70, *range(150, 158))
            if columns > 70:  # the prompt was read, in one call
                cache = copy.deepcopy(start)
    assert at > 20 + 4 * 397
    assert torch.equal(out, model.generate(IDS, past_key_values=copy.deepcopy(start), **GREEDY))
    assert torch.equal(model.generate(IDS, **GREEDY), want)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_threads_with_a_cache_each(case: Case):
    """Two conversations over one model at once: tokens and caches as of one after the other."""
    model = patch(tiny_llama(), case[0], **case[1])

    def talk(seed: int) -> list[torch.Tensor]:
        cache, ids = QAttnCache.for_model(model), random_ids(1 + seed % 2, 40, seed)
        for turn in range(2):
            ids = torch.cat([ids, random_ids(len(ids), 30, 10 * seed + turn)], 1)
            ids = model.generate(ids, past_key_values=cache, **GREEDY)
        return [ids, *(layer.rewritten() for layer in cache.layers)]

    want = [talk(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(talk, range(4)))
    assert all(torch.equal(a, b) for x, y in zip(found, want, strict=True) for a, b in zip(x, y, strict=True))


def test_a_cache_that_another_model_wrote_is_refused():
    model, same, other = (tiny_llama() for _ in range(3))
    other.lm_head.weight.mul_(2)
    other.model.layers[1].self_attn.v_proj.weight.mul_(2)
    for each in (model, same, other):
        patch(each, "turbo")
    cache = model(IDS[:, :70]).past_key_values
    for module in (other, other.get_decoder()):
        with pytest.raises(UnsupportedError, match=r"another model wrote this cache \(the same config with other weig"):
            module(IDS[:, 70:], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="another model"):
        other.generate(IDS, past_key_values=cache, **GREEDY)
    assert int(cache.get_seq_length()) == 70
    want = model(IDS).logits[:, -1].argmax(-1)
    model.get_decoder()(IDS[:, 70:100], past_key_values=cache)
    got = same(IDS[:, 100:], past_key_values=cache).logits[:, -1].argmax(-1)  # the same weights
    assert got.shape == want.shape
    cache.reset()
    other(IDS[:, :70], past_key_values=cache)


def test_a_model_that_moved_goes_on_with_its_cache():
    """Another dtype: keys and values of before stay as they are, to their own precision."""
    model = patch(tiny_llama(), "turbo")
    cache = model(IDS[:, :70]).past_key_values
    want = model(IDS[:, 70:71], past_key_values=copy.deepcopy(cache)).logits
    model.double()
    got = model(IDS[:, 70:71], past_key_values=cache).logits
    torch.testing.assert_close(got.float(), want, rtol=0, atol=1e-4)  # fp32 sums and a token's codes
    model.to("meta")
    with pytest.raises(UnsupportedError, match=r"on cpu, the model has .* on meta.*or it has moved"):
        model(IDS[:, 70:71].to("meta"), past_key_values=cache)


def test_another_patch_leaves_the_cache_its_method():
    """Layers hold the formats that they were made with; the next cache has the new ones."""
    model = patch(tiny_llama(), "turbo")
    cache, want = model(IDS[:, :70]).past_key_values, model.generate(IDS, **GREEDY)
    patch(model, "kivi", bits=4)
    assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), want)
    assert "turbo" in str(report(cache)) and "turbo" in str(report(model))
    model(IDS)
    assert "kivi" in str(report(model))


def test_offloading_is_refused():
    model = patch(tiny_llama(), "turbo")
    cache = model(IDS[:, :70]).past_key_values
    for call in (lambda: cache.offload(0), lambda: model.generate(IDS, cache_implementation="offloaded", **GREEDY)):
        with pytest.raises(UnsupportedError, match=r"cannot offload.*cache\.save\(path\)|='offloaded' asks for anot"):
            call()
    assert int(cache.get_seq_length()) == 70


COPIES: dict[str, Callable[[QAttnCache], QAttnCache]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": lambda cache: saved_by_torch(cache),
}


def saved_by_torch(cache: QAttnCache) -> QAttnCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    found: QAttnCache = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("case", [*CASES, ("turbo", {"layers": {"0": {"method": "kivi", "bits": 4}}})], ids=case_id)
def test_copies_of_half_used_caches_go_on_by_themselves(case: Case, how: str):
    """With open blocks, rings, sinks; each copy is asked something else."""
    model = patch(tiny_llama(), case[0], **case[1])
    cache = model(IDS[:, :77]).past_key_values
    copied = COPIES[how](cache)
    for each, seed in ((copied, 3), (cache, 4), (copied, 5)):
        new, twin = random_ids(2, 30, seed), model(IDS[:, :77]).past_key_values
        if seed == 5:
            model(random_ids(2, 30, 3), past_key_values=twin)
        got, want = (model(new, past_key_values=x).logits for x in (each, twin))
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_broken_token_of_a_padded_prompt_stays_in_its_row(case: Case):
    model, mask = patch(tiny_llama(), case[0], **case[1]), torch.ones_like(IDS)
    mask[0, :20] = 0
    want = model.generate(IDS, attention_mask=mask, **GREEDY)

    def overflow(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[1, 60 : 60 + (out.shape[1] > 60), 5] = torch.inf
        return out

    model.model.embed_tokens.register_forward_hook(overflow)
    got = model.generate(IDS, attention_mask=mask, **GREEDY)
    assert torch.equal(got[0], want[0])
    assert [row["nonfinite"] for row in report(model).to_dict()["layers"]] == [1, 1]
    assert "1 tokens not finite" in str(report(model))
