"""Small models, and layers fed by hand, for the tests."""

from __future__ import annotations

import math
from typing import Any

import papers.paper_int_flash
import papers.paper_sage2
import papers.paper_sinkq
import papers.paper_turbo
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qattn_hf import list_methods
from qattn_hf.attention.model_constants.compensation import shares
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.formats.traits import compensates, has_static_scales
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.skip_counts import SkipCounts
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import needs_constants
from qattn_kernels.layout import State

# methods of `eval/papers/`, whose comparisons the reference computes
PAPERS = [
    papers.paper_int_flash.PaperIntFlash,
    papers.paper_sage2.PaperSage2,
    papers.paper_sinkq.PaperSinkQ,
    papers.paper_turbo.PaperTurbo,
]
SAGE1: dict[str, Any] = {"granularity": "block", "smooth_q": "none", "pv": "model"}  # the recipe sage1
COUNTERS = ("nonfinite", *(f"v_{name}" for name in SkipCounts._fields))  # of events: roll-backs do not undo them
Case = tuple[str, dict[str, Any]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels are tested, see conftest.py
# more settings in which a row keeps what its first tokens fixed
FIXED: list[Case] = [
    ("paper_turbo", {"buffer_scale": "universal"}),
    ("turbo", {"bits": "mixed", "smooth_k": True}),
    ("paper_sage2", {"v_scale": "prompt"}),
    ("paper_int_flash", {"v_granularity": "tensor", "smooth_k": True}),
    ("paper_sinkq", {"group_size": 32, "residual_length": 0, "sink_prefill": "whole", "sink_skip_layers": 0}),
]


def cases() -> list[Case]:
    """Every method found, with its defaults and with the variants it names, and the variants of the papers' methods."""
    found = [(name, dict(v)) for name in list_methods() for v in ({}, *get_method(name).variants)]
    return found + [(paper.name(), dict(v)) for paper in PAPERS for v in paper.variants]


def case_id(case: Case) -> str:
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama of two layers, head dim 16, two KV heads; the same at every call."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    special = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None, max_position_embeddings=2048)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, **special, **changes})).eval()


def random_ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def constants_of(spec: LayerSpec, heads: int = 2, dim: int = 32) -> State:
    """What a layer without a model has in place of its model's constants: random ones."""
    found, generator = {}, torch.Generator().manual_seed(7)
    if compensates(spec.k):
        some = torch.randn(heads, 2 * dim, dim, generator=generator)
        found["k.compensation"] = shares(some.mT @ some)
    if spec.compute.equalize:
        by = (torch.randn(heads, dim, generator=generator) / 2).exp2()  # of no keys: larger ones cost codes
        found["k.equalizer"] = torch.stack([1 / by, by])
    if has_static_scales(spec.k):
        found["k.static"], found["v.static"] = torch.rand(2, heads, generator=generator) / 16 + 1 / 32
    return found


class GivenLayer(QAttnLayer):
    """A layer with the constants of `constants_of`."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.constants = constants_of(self.spec, key_states.shape[1], key_states.shape[3])
        super().lazy_initialization(key_states, value_states)


def make_layer(case: Case, max_cache_len: int | None = 512, heads: int = 2) -> QAttnLayer:
    """The last layer of a model with `heads` KV heads."""
    spec = get_method(case[0])(**case[1]).last_layer_spec(heads)
    return (GivenLayer if needs_constants(spec) else QAttnLayer)(spec, max_cache_len)


def spoil(layer: QAttnLayer, used: int) -> None:
    """Fill the blocks of a layer that follow the `used` ones with NaN, or with codes."""
    for name, spec in layer.tensor_specs().items():
        if spec.block_dim is not None:
            unused = layer.state[name].narrow(spec.block_dim, used, layer.blocks - used)
            unused.fill_(math.nan if unused.is_floating_point() else 85)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_qkv(rows: int, tokens: int, seed: int = 0, dim: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, with a channel that stands out as in real keys."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, h, tokens, dim, generator=g) for h in (4, 2, 2))
    k[..., 3] += 4
    return q, k, v


def feed(
    layer: QAttnLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: list[int],
    first: int = 0,
    scores: Scores | None = None,
) -> torch.Tensor:
    """Send tokens through a layer in calls that end at `cuts`; the first `first` columns of row 0 are padding."""
    out, start = [], 0
    for end in cuts:
        span = torch.tensor([[0, end - start]] * len(q), dtype=torch.int32, device=q.device)
        padding = min(max(first - start, 0), end - start)
        span[0, 0], span[0, 1] = padding, end - start - padding
        handle, _ = layer.update(k[:, :, start:end], v[:, :, start:end])
        out.append(layer.attend(q[:, :, start:end], handle, span, scores or Scores(q.shape[-1] ** -0.5))[0])
        start = end
    return torch.cat(out, 2)


def same_state(a: QAttnLayer, b: QAttnLayer, rows: tuple[int, int] | None = None) -> list[str]:
    """Names of the state tensors in which two layers differ, in all rows or in one row of each."""
    different = []
    for name, (tensor, dim) in a.state_tensors().items():
        other = b.state[name]
        if rows is not None and dim is not None:
            tensor, other = tensor.select(dim, rows[0]), other.select(dim, rows[1])
        elif rows is not None:
            continue
        if name not in COUNTERS and not torch.equal(tensor, other):
            different.append(name)
    return different


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference as a share of the norm of `want`, in fp64."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item()


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last queries over all keys, in fp64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    mask = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
