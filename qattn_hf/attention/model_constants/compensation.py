"""GPTQ-style rounding for keys, weighted by the second moment of the queries (`compensate_k`).

GPTQ (Frantar et al., arXiv 2210.17323) rounds a layer's weights by the second moment of the layer's inputs. Cached keys
are multiplied by queries, so the queries' second moment takes that role. It is a property of the model: one pass over
random tokens measures it, without any text. The tokens' positions are spread over the model's range, because keys and
queries are read after the rotary embedding.
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

TOKENS = 2048  # tokens of the pass; gives several times as many queries as a head has channels
FARTHEST = 32768  # largest position of these tokens
# Add this multiple of the mean diagonal to a moment. GPTQ adds 0.01. With 0.1, score errors on text are smaller, but
# recall of lists is worse (docs/results/quality.md): it depends on a few queries in unusual directions.
DAMP = 3.0
SEED = 0  # seed of the tokens, so that a model has one moment


def second_moments(
    model: PreTrainedModel, wanted: dict[int, LayerSpec], scales: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the second moments of the queries of these layers: fp32 `[Hkv, D, D]`.

    An entry is the mean product of two channels, over the queries of a KV head, rotated like its keys.

    Args:
        scales: result of `equalizer.equalizers` for layers with equalized keys.
    """
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
    """Run an unpatched model on `probe`, and let `observer` see the attention of these layers."""
    windows = [i for i, spec in wanted.items() if window_of(spec) is not None]
    with torch.no_grad(), observed(model, observer, windows):
        decoder_of(model)(**probe(model, gaps), use_cache=False)


def probe(model: PreTrainedModel, gaps: bool = True) -> dict[str, Any]:
    """Return the arguments of a pass: random tokens at equally spaced positions, or at consecutive
    ones without `gaps`."""
    text: Any = model.config.get_text_config(decoder=True)
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    positions = min(next(filter(None, known), TOKENS), FARTHEST)
    tokens = min(TOKENS, positions)
    ids = torch.randint(text.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(SEED), device="cpu")
    at = torch.arange(tokens, device="cpu")[None] * (positions // tokens if gaps else 1)
    # without a mask Transformers would take gaps for boundaries of packed texts
    inputs = {"input_ids": ids, "position_ids": at, "attention_mask": torch.ones_like(ids)}
    return {name: tensor.to(device_of(model)) for name, tensor in inputs.items()}


def shares(moment: torch.Tensor) -> torch.Tensor:
    """Convert a second moment `[Hkv, D, D]` to fp16 `[Hkv, D, D]`, the `compensation` of
    `formats.kivi.reference.encode_compensated`."""
    moment, dim = moment.double(), moment.shape[-1]
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damp = DAMP * mean + torch.finfo(torch.float32).tiny  # keeps the matrix invertible if all queries are zero
    damped = moment + damp * torch.eye(dim, dtype=moment.dtype, device=moment.device)
    upper, found = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True), torch.zeros_like(moment)
    for at in range(0, dim - TOGETHER, TOGETHER):
        group, behind = slice(at, at + TOGETHER), slice(at + TOGETHER, dim)
        share = torch.linalg.solve_triangular(upper[:, group, group], upper[:, group, behind], upper=True)
        found[:, behind, group] = share.mT
    return found.half()
