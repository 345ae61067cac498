"""Every call that a trained model makes: the kernels against the reference on the same state. Trained keys and scores
are steep where random ones are not, and its heads differ. On a GPU for every method, in the interpreter for some."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, cases
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import QAttnCache, patch
from qattn_hf.assets import demo_model_dir
from qattn_kernels.layer.skip_counts import SkipCounts
from qattn_kernels.layer.step import Step
from qattn_kernels.step import kernels as fused
from qattn_kernels.step.reference import reference_step

ON_GPU = DEVICE == "cuda"
SKIP_COUNTS = {
    f"v_{name}" for name in SkipCounts._fields
}  # of sparse V: kernels skip whole tiles, the reference single tokens
TEXT = "Question: Tom has 7 apples and buys 15 more. He gives 4 to Mary. How many apples has Tom now?\nAnswer: "
# long calls, calls of several widths, and single tokens
CUTS = (61, 122, 183, 188, 204, 205, 206) if ON_GPU else (61, 122, 127, 128, 129)
# Where weights and queries are INT8, the reference's own rounding of them moves a steep row by 0.1 and more. A kernel
# may err no more than that, in the mean of all calls of a width (of one token, whose few rows are steep or not, each
# may round either way); and by as much as its products of halves and INT8 pairs do, where the reference has floats.
SLACK, FLOOR = 1.25, 2e-3
# Sinks in unpacked INT8 keys have the scale of their block, and so few of its levels, since they are small; a head that
# looks at them alone shows it: 1.4 times the reference's error, which has them by their own scales. KL is the same.
POOL_SLACK = 2.0


@dataclass
class Compared:
    """Runs the kernels, and the reference on copies of the state, with queries and weights as it rounds them and as
    they are; keeps the errors of both against the latter, and what the state differs in. Queries that are to have 4
    bits have so everywhere."""

    kernels: Any
    errors: list[tuple[int, float, float]] = field(default_factory=list)
    states: set[str] = field(default_factory=set)

    def __call__(self, step: Step) -> Any:
        query, key, value, span, memory, scores, _ = step
        state, spec = memory.state, memory.spec
        copy, other = ({name: tensor.clone() for name, tensor in state.items()} for _ in range(2))
        out, lse = self.kernels(step)
        want, _ = reference_step(query, key, value, span, copy, spec, scores)
        decode = spec.compute.decode if spec.compute.decode_levels < 127 else "model"
        floats = replace(spec, compute=replace(spec.compute, pv="model", decode=decode))
        exact, _ = reference_step(query, key, value, span, other, floats, scores)
        ours, theirs = (((x.double() - exact.double()).norm() / exact.double().norm()).item() for x in (out, want))
        self.errors.append((query.shape[2], ours, theirs))
        self.states |= {name for name in state if name not in SKIP_COUNTS and not torch.equal(state[name], copy[name])}
        return out, lse

    def worse(self, slack: float) -> list[tuple[int, float, float]]:
        """Return the widths where the kernels' error is more than `slack` times the reference's, with both errors."""
        found = []
        for width in {width for width, _, _ in self.errors}:
            both = [errors for at, *errors in self.errors if at == width]
            ours, theirs = (sum(x * x for x in one) ** 0.5 / len(both) ** 0.5 for one in zip(*both, strict=True))
            if ours >= slack * theirs + FLOOR:
                found.append((width, ours, theirs))
        return found


SOME: list[Case] = [
    ("turbo", {"bits": "mixed"}),
    ("sinkq", {"group_size": 64, "residual_length": 0, "sink_skip_layers": 0}),
    ("int_flash", {"bits": 4, "rotate": "hadamard"}),
]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.product
@pytest.mark.parametrize("case", cases() if ON_GPU else SOME, ids=case_id)
def test_every_call_of_a_trained_model(case: Case, monkeypatch: pytest.MonkeyPatch):
    path = demo_model_dir()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, num_hidden_layers=8 if ON_GPU else 1)
    settings = case[1]
    if settings.get("softmax") == "sas":  # its cut depends on the parts that a context is read in
        settings = {**settings, "sas_threshold": -1e9}
    patch(model.to(DEVICE).eval(), case[0], **settings, impl="auto" if ON_GPU else "triton")
    compared = Compared(fused.run_step)  # from here on: `patch` asks what calls would launch, and runs nothing
    monkeypatch.setattr(fused, "run_step", compared)
    ids = AutoTokenizer.from_pretrained(path)(TEXT * 12, return_tensors="pt").input_ids[:, : CUTS[-1]].to(DEVICE)
    cache, start = QAttnCache.for_model(model, max_cache_len=512), 0
    with torch.inference_mode():
        for end in CUTS:
            model(ids[:, start:end], past_key_values=cache)
            start = end
    if not compared.errors:
        pytest.skip(f"there are no kernels for {case_id(case)}")
    assert compared.states == set()
    with_pool = case[0] == "turbo" and any(spec.sink_pool.num for spec in model._qattn.packed)
    assert compared.worse(POOL_SLACK if with_pool else SLACK) == []
