"""Kernels over blocks in a pool do what they do over an arena of the row's own, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer, random_qkv

from qattn_hf.generate.continuous.batch import Held, batches
from qattn_hf.generate.continuous.page_layout import by_block, bytes_of, resized
from qattn_hf.generate.continuous.pages import PagedLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.launch import plan
from qattn_kernels.layer.arena import Layout
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import Geometry

pytestmark = pytest.mark.gpu
CASES: list[Case] = [("turbo", {}), ("int8", {}), ("kivi", {"bits": 4}), ("turboquant", {})]
CASES += [("turbo", {"sink_num": 1, "sink_window": 0})]  # the pool gives tokens back to blocks of earlier calls
if DEVICE == "cuda":  # the interpreter is slow, and where pages lie is the same to all formats
    CASES += [
        ("turbo", {"sink_num": 0}),
        ("turbo", {"bits": 2}),
        ("sinkq", {"group_size": 64}),
        ("sinkq", {"group_size": 32, "residual_length": 32, "rotate_k": "hadamard", "rotate_v": "hadamard"}),
        ("sage2", {}),
        ("nf4", {}),
        ("none", {}),
    ]
LENGTHS = (70, 63, 5)  # of rows before their steps: the second closes a block with the first step
PAGES, DIM = 40, 64


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_steps_over_pages_are_those_over_arenas(case: Case):
    spec = replace(make_layer(case).spec, impl="triton")
    device, block = torch.device(DEVICE), spec.window.block
    layout = Layout(Geometry(1, 2, DIM, DIM, 1, torch.float32), spec)
    memory = torch.zeros(bytes_of(by_block(resized(layout, 1, PAGES))), dtype=torch.uint8, device=device)
    paged = PagedLayer(layout, memory, PAGES, len(LENGTHS) + 2)
    assert paged.in_place
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0)).add(1).tolist()
    layers = [QAttnLayer(spec) for _ in LENGTHS]
    slots = [1, 2, 4]  # in the last steps, when the second has ended, they do not follow one another
    past = [0] * len(LENGTHS)

    def forward(rows: list[int], tokens: list[int], seed: int) -> None:
        requests = []
        for row, count in zip(rows, tokens, strict=True):
            pages = order[row :: len(LENGTHS)][: -(-(past[row] + count) // block)]
            requests.append(Held(slots[row], past[row], count, pages, past[row] == 0))
        qkv = [random_qkv(1, count, seed + row, DIM) for row, count in zip(rows, tokens, strict=True)]
        qkv = [tuple(x.to(device) for x in parts) for parts in qkv]
        columns = [torch.cat(parts, 2) for parts in zip(*qkv, strict=True)]
        out = columns[0].new_zeros(*columns[0].shape[:2], columns[0].shape[2] + 1, DIM)
        for call in batches(requests, spec.window, device, paged.slots, in_place=True):
            q, k, v = (x[0].transpose(0, 1)[call.columns].transpose(1, 2) for x in columns)
            out[0].transpose(0, 1)[call.targets] = paged.attend(call, q, k, v, Scores(0.25)).transpose(1, 2)
        begin = 0
        for row, (q, k, v), count in zip(rows, qkv, tokens, strict=True):
            span = torch.tensor([[0, count]], dtype=torch.int32, device=device)
            want = layers[row].attend(q, layers[row].update(k, v)[0], span, Scores(0.25))[0]
            # rows of one call share its splits, so that sums of fp32 may have another order
            torch.testing.assert_close(out[:, :, begin : begin + count], want, rtol=2e-6, atol=2e-6)
            past[row] += count
            begin += count

    forward([0, 1, 2], list(LENGTHS), 0)
    for step in range(2):  # the second is launched from a plan
        forward([0, 1, 2], [1] * 3, 100 + 10 * step)
    forward([0, 2], [1] * 2, 200)
    mine = [found for (what, _), found in plan._plans.items() if what[0] == paged.name]
    assert mine and None not in mine, "steps over pages are launched from plans"
    for row, layer in enumerate(layers):
        held = Held(slots[row], past[row], 1, order[row :: len(LENGTHS)][: -(-past[row] // block)], False)
        (call,) = batches([held], spec.window, device, paged.slots)
        arena, where = paged.gather(call)
        layer._grow(where.geometry.blocks)
        mine = QAttnLayer(spec)
        mine.borrow(arena, where.geometry, spec, past[row])
        closed = int(layer.state["closed"])
        for name, tensor in layer.tensor_specs().items():
            if tensor.batch_dim is not None:
                a, b = mine.state[name], layer.state[name]
                if tensor.block_dim is not None:
                    a, b = (x.narrow(tensor.block_dim, 0, closed) for x in (a, b))
                assert torch.equal(a, b), (row, name)
