"""Refused settings: each gets one clear message, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused, refused_patch

from qattn_hf import QAttnCache, list_methods, load_recipe, patch, report
from qattn_hf.errors import RecipeError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_grad")


MIXED = {"bits": "mixed"}
FIRST = "defaults of turbo for llama, measured in released-smollm2.json"  # the recipe of `patched`
SETTINGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"method": "turb"}, ("unknown method 'turb'", "did you mean 'turbo'?", *list_methods())),
    ({"recipe": "trubo"}, ("unknown recipe 'trubo'", "did you mean 'turbo'?")),
    ({"k_bit": 4}, ("unknown key 'k_bit'", "did you mean 'k_bits'?")),
    ({"method": "int8", "bits": 4}, ("int8", "unknown key 'bits'", "softmax")),
    ({"method": "turbo", "bits": 3}, ("bits = 3", "4, 2 or 'mixed'")),
    ({"bits": "4"}, ("bits = '4'", "4, 2 or 'mixed'")),
    ({"bits": True}, ("bits = True", "4, 2 or 'mixed'")),
    ({"k_low_heads": [["0"], [1]], **MIXED}, ("k_low_heads", "'0'", "integer")),
    ({"block_kv": 48}, ("block_kv = 48", "32, 64 or 128")),
    ({"sas_threshold": 0.0}, ("sas_threshold = 0.0", "less than 0")),
    ({"n_h": 3, **MIXED}, ("n_h = 3", "2 KV heads")),
    ({"scope": "joint", **MIXED}, ("scope='joint'", "Fix: take k_low_heads and v_low_heads")),
    ({"priority": "random", **MIXED}, ("priority='random'", "Fix: take the method paper_turbo")),
    ({"p_scale": "tile"}, ("p_scale='tile'", "Fix: take the method paper_turbo", "eval/papers/paper_turbo.py")),
    ({"layers": {"0": {"sink_exclude": False}}}, ("layers 0: sink_exclude=False", "the method paper_sinkq")),
    ({"method": "sage2", "version": 1}, ("version=1", "Fix: take the recipe sage1")),
    ({"method": "sage2", "pv": "e5m2"}, ("pv='e5m2'", "Fix: take the method paper_sage2")),
    ({"p_scale": "tiles"}, ("unknown key 'p_scale'",)),
    ({"n_h": 1}, ("n_h", "bits='mixed'")),
    (
        {"method": "paper_turbo", "v_scale": "token", "buffer_scale": "universal"},
        ("buffer_scale='universal'", "leave out smooth_k and v_scale='token'"),
    ),
    ({"n_h": 1, "k_low_heads": [[0], [0]], **MIXED}, ("n_h clashes with k_low_heads",)),
    ({"buffer_size": 96}, ("buffer_size=96", "multiple of block_kv=64")),
    ({"k_low_heads": [[0], [1]]}, ("k_low_heads needs k_bits='mixed'", "4")),
    ({"k_low_heads": [[0]], **MIXED}, ("k_low_heads has 1 layers", "the model has 2")),
    ({"v_low_heads": [[0], [1, 1]], **MIXED}, ("v_low_heads, layer 1 = [1, 1]", "0 to 1, each once")),
    ({"k_low_heads": [[0], [2]], **MIXED}, ("k_low_heads, layer 1 = [2]", "0 to 1")),
    ({"compute": "int8", "decode_compute": "model"}, ("compute='int8'", "decode_compute='model'", "or the two apart")),
    ({"impl": "triton"}, ("impl = 'triton'", "use impl='auto' or 'reference'")),
    ({"decode": "cuda"}, ("decode = 'cuda'", "'auto', 'graph', 'fused', 'compile' or 'eager'")),
    ({"method": "int8", "recipe": "turbo"}, ("method='int8' clashes", "'turbo'", "give one of them")),
    (
        {"method": "turbo", "bits": 3, "crop_horizon": 1, "sofmax": "sas"},
        ("bits = 3", "crop_horizon = 1", "did you mean 'softmax'?"),
    ),
    (
        {"method": "paper_int_flash", "mode": "half", "v_granularity": "tensor"},
        ("v_granularity='tensor'", "mode='half'"),
    ),
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
    for decode in ("fused", "graph"):
        parts = f"decode='{decode}'", "the model is on the cpu", "decode='auto'"
        refused_patch(stock, UnsupportedError, *parts, decode=decode)
    refused(lambda: patch(patched, decode="graph"), UnsupportedError, *parts)
    assert report(patched).to_dict()["recipe_origin"] == FIRST, "the first patch is gone"
