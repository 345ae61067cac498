"""What errors of keys cost a model, by which their channels make up for one another (`compensate_k`).

GPTQ (Frantar et al., arXiv 2210.17323) rounds a layer's weights by the second moment of its inputs. What cached keys
meet is queries, whose second moment is the model's own: it is found by one pass of random tokens, so that no text is
needed, at positions over all that the model knows, since keys and queries are read after the rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, Observer, observed
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import device_of
from qattn_hf.model.layer_kinds import window_of
from qattn_kernels.formats.kivi.reference import TOGETHER
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.states import rotate

TOKENS = 2048  # of the pass: several times as many queries as a head has channels
FARTHEST = 32768  # position up to which these are spread
# So many times the mean of a moment's diagonal are added to it. GPTQ adds a hundredth; with 0.1 errors of scores are
# smaller on text, but lists are recalled worse (docs/results/quality.md), by few queries in directions of their own.
DAMP = 3.0
SEED = 0  # of the tokens: a model has one moment


def second_moments(
    model: PreTrainedModel, wanted: dict[int, LayerSpec], scales: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """fp32 `[Hkv, D, D]` of these layers: the mean product of each two channels of the queries that meet a KV head,
    rotated as its keys are. `scales`: of layers whose keys are equalized, `equalizer.equalizers`."""
    found: dict[int, torch.Tensor] = {}

    def observer(call: Call) -> None:
        if (spec := wanted.get(call.layer)) is not None:
            of_queries = scales[call.layer][1] if spec.compute.equalize else None
            query = call.query if spec.compute.rotate == "none" else rotate(call.query, of_queries)
            of_head = query[0].float().unflatten(0, (call.keys.shape[1], -1)).flatten(1, 2)
            found[call.layer] = of_head.mT @ of_head / of_head.shape[1]

    observe(model, wanted, observer)
    return found


def observe(model: PreTrainedModel, wanted: dict[int, LayerSpec], observer: Observer, gaps: bool = True) -> None:
    """Let a model, not patched, read `probe`, and `observer` see the attention of these layers."""
    windows = [i for i, spec in wanted.items() if window_of(spec) is not None]
    with torch.no_grad(), observed(model, observer, windows):
        decoder_of(model)(**probe(model, gaps), use_cache=False)


def probe(model: PreTrainedModel, gaps: bool = True) -> dict[str, Any]:
    """Arguments of a pass: random tokens, at positions with equal gaps, or side by side."""
    text: Any = model.config.get_text_config(decoder=True)
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    positions = min(next(filter(None, known), TOKENS), FARTHEST)
    tokens = min(TOKENS, positions)
    ids = torch.randint(text.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(SEED), device="cpu")
    at = torch.arange(tokens, device="cpu")[None] * (positions // tokens if gaps else 1)
    # with a mask, since without one transformers takes gaps for the ends of texts in one row
    inputs = {"input_ids": ids, "position_ids": at, "attention_mask": torch.ones_like(ids)}
    return {name: tensor.to(device_of(model)) for name, tensor in inputs.items()}


def shares(moment: torch.Tensor) -> torch.Tensor:
    """fp16 `[Hkv, D, D]` from a second moment `[Hkv, D, D]`: `compensation` of
    `formats.kivi.reference.encode_compensated`."""
    moment, dim = moment.double(), moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damp = DAMP * mean + torch.finfo(torch.float32).tiny  # also of queries of zeros
    damped = moment + damp * torch.eye(dim, dtype=moment.dtype, device=moment.device)
    upper, found = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True), torch.zeros_like(moment)
    for at in range(0, dim - TOGETHER, TOGETHER):
        group, behind = slice(at, at + TOGETHER), slice(at + TOGETHER, dim)
        share = torch.linalg.solve_triangular(upper[:, group, group], upper[:, group, behind], upper=True)
        found[:, behind, group] = share.mT
    return found.half()
