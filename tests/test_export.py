"""Exports of a patched model: refused in words that name `unpatch`, by every way that torch and transformers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from qattn_hf import UnsupportedError, patch, unpatch

pytestmark = pytest.mark.usefixtures("no_grad")
IDS = random_ids(1, 3)
SAID = r"cannot be exported.*call unpatch\(model\) before"


def by_torch(model: torch.nn.Module, strict: bool) -> Any:
    return torch.export.export(model, (IDS,), {"use_cache": False}, strict=strict)


def by_executorch(model: torch.nn.Module, strict: bool) -> Any:
    return TorchExportableModuleForDecoderOnlyLM(model, 1, 64).export(input_ids=IDS, strict=strict)


def llama() -> torch.nn.Module:
    model = tiny_llama()
    model.generation_config.cache_implementation = "static"  # as ExecuTorch wants it
    model.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 64}
    return model


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("export", "settings"),
    [(by_torch, {}), (by_executorch, {}), (by_torch, {"method": "sage2", "cache": "model"})],
    ids=["torch", "executorch", "torch over a stock cache"],
)
def test_an_export_names_the_way_out(export: Callable, settings: dict[str, Any], strict: bool):
    model = llama()
    patch(model, **{"method": "none", **settings})
    # a strict export raises another error, which contains our message
    kind = torch._dynamo.exc.Unsupported if strict else UnsupportedError
    with pytest.raises(kind, match=SAID):
        export(model, strict)


@pytest.mark.parametrize("settings", [{"method": "turbo"}, {"method": "sage2", "cache": "model"}], ids=str)
def test_a_compiled_call_is_no_export(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    # as torch 2.11 answers inside of any compiled call
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    model = patch(tiny_llama(), **settings)
    cache = model(IDS).past_key_values
    step = torch.compile(model, backend="eager", fullgraph=True)
    step(IDS[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == IDS.shape[1] + 1


def test_the_unpatched_model_is_exported():
    model = unpatch(patch(tiny_llama(), "none"))
    exported = by_torch(model, strict=False).module()(IDS, use_cache=False)
    # an export may order sums in another way
    torch.testing.assert_close(exported.logits, model(IDS, use_cache=False).logits)
