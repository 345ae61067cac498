"""What a decode step of the kernels allocates beyond the cache that it reads: scratch for its parts, never a copy of
keys or values. Only a GPU counts what was allocated."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, case_id, cases

from qattn_hf.bench.layers import Heads, make_layer
from qattn_hf.layer.filled import fill
from qattn_hf.methods import get_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.support import unsupported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: memory is counted there"),
]

BATCH, TOKENS, ROOM = 4, 32768, 256
HEADS = Heads()  # of an 8B model: 32 query heads, 8 KV heads, head dim 128
LIMIT = 64 * 2**20  # keys alone, dequantized to bf16, would be 256 MiB, and scores in fp32 16 MiB


@pytest.mark.parametrize("case", cases(), ids=case_id)
@torch.no_grad()
def test_a_decode_step_allocates_little_beyond_its_state(case: Case):
    """Steps on both sides of a block's end, each alone; the first also pays what is allocated only once."""
    method = get_method(case[0])
    reason = unsupported(method(**case[1]).last_layer_spec(HEADS.kv), HEADS.kv, HEADS.dim, HEADS.dim)
    if reason is not None:
        pytest.skip(f"there are no kernels for {case_id(case)}: {reason}")
    device = torch.device("cuda")
    layer = make_layer(method(**case[1], impl="triton"), HEADS, BATCH, TOKENS + ROOM, device)
    start = TOKENS - 2 + layer.spec.window.residual  # a block closes when this number of tokens follows its last
    fill(layer, start)
    q, k, v = (
        torch.randn(BATCH, heads, 1, HEADS.dim, dtype=HEADS.dtype, device=device)
        for heads in (HEADS.query, HEADS.kv, HEADS.kv)
    )
    span, scores = torch.tensor([[0, 1]], dtype=torch.int32, device=device), Scores(HEADS.dim**-0.5)
    before = layer.state["closed"].clone()
    allocated = []
    for _ in range(4):
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, _ = layer.attend(q, layer.update(k, v)[0], span, scores)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.max_memory_allocated() - held)
        assert out.isfinite().all()
    state = sum(tensor.nbytes for tensor in layer.state.values())
    print(f"{state / 2**20:.0f} MiB of state, at most {max(allocated) / 2**20:.2f} MiB more in a step")
    assert layer.spec.impl == "triton"
    assert layer.state["length"].tolist() == [start + 4] * BATCH
    if layer.spec.k.windowed or layer.spec.v.windowed:
        assert (layer.state["closed"] > before).all(), "one of the steps closed a block"
    assert max(allocated) <= LIMIT
