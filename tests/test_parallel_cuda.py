"""Several GPUs: a model dispatched over them, split over them, and data parallel evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Case, case_id, random_ids, tiny_llama
from test_parallel import LISTS, ROOT, split, whole

from qattn_hf import patch, report
from qattn_hf.assets import demo_model_dir

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]
CASES: list[Case] = [("turbo", {}), ("turbo", {"bits": "mixed"}), ("sage2", {}), ("sinkq", {}), ("turboquant", {})]
SIZES = dict(num_hidden_layers=4, hidden_size=256, head_dim=64)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layers_on_other_gpus_than_the_current_one(case: Case):
    """As `device_map="auto"` places them: kernels run where their tensors are, not on the current device."""
    from accelerate import dispatch_model

    home = torch.device("cuda", torch.cuda.current_device())
    ids = random_ids(2, 300)
    wanted: dict[str, Any] = dict(max_new_tokens=40, do_sample=False)
    want = patch(tiny_llama(**SIZES).to(home), case[0], **case[1], decode="eager").generate(ids.to(home), **wanted)
    places = [(home.index + i) % GPUS for i in (0, 1)]
    names = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1")
    last = ("model.layers.2", "model.layers.3", "model.norm", "lm_head")
    device_map = {name: place for part, place in ((names, places[0]), (last, places[1])) for name in part}
    model = patch(dispatch_model(tiny_llama(**SIZES), device_map), case[0], **case[1])
    got = model.generate(ids.to(home), **wanted)
    held = report(model).to_dict()
    assert held["impl"] == "triton" and held["decode"] == "eager" and "several devices" in held["decode_reason"]
    assert {layer.device.index for layer in model._qattn.last.cache.layers} == set(places)
    assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("sliding", ["exact", "packed"])
def test_a_layer_on_another_gpu_reads_keys_that_it_shares(sliding: str):
    from accelerate import dispatch_model
    from small_types import SHARED_KEYS, tiny

    ids, changes = random_ids(2, 90), {"num_hidden_layers": 6, "vocab_size": 101, **SHARED_KEYS}
    wanted: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    how = {"impl": "reference", "sliding": sliding, "decode": "eager"}  # kernels know no head dim of 16
    want = patch(tiny("gemma4_text", **changes).cuda(), "turbo", **how).generate(ids.cuda(), **wanted)
    places = {f"model.layers.{i}": int(i >= 4) for i in range(6)}
    model = tiny("gemma4_text", **changes)
    rest = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = {**places, **{f"model.{name}": 0 for name in rest}, "lm_head": 0}  # whose weights are the embedding's
    dispatch_model(model, device_map, skip_keys=model._skip_keys_device_placement)  # as `from_pretrained` does
    got = patch(model, "turbo", **how).generate(ids.cuda(), **wanted)
    assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("settings", [{}, LISTS, {"decode": "graph"}], ids=["4 bits", "lists of heads", "captured"])
def test_a_model_split_by_tensor_parallelism(tmp_path: Path, settings: dict[str, Any]):
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=98)
    model.save_pretrained(tmp_path)
    [found] = split(tmp_path, "turbo", settings)
    logits, held = whole(model.cuda(), "turbo", settings)
    assert found["impl"] == held["impl"] == "triton" and found["packed_tokens"] == held["packed_tokens"] > 0
    assert found["decode"] == settings.get("decode", "eager"), "collectives are captured with the step only if asked"
    assert abs(found["kv_bytes"] / held["kv_bytes"] - 0.5) < 0.05
    # sums over processes are added in another order, and codes may fall to the other side of a rounding
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, atol=5e-3, rtol=0)


def test_data_parallel_evaluation_scores_as_one_process_does(tmp_path: Path):
    """With `accelerate launch` each GPU answers its rows, and the score equals that of one GPU."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'qattn-hf[eval]'")
    model = ["--model", "qattn", "--model_args", f"pretrained={demo_model_dir()},method=turbo,bits=2"]
    tasks = ["--tasks", "recall_40", "--limit", "40", "--gen_kwargs", "max_gen_toks=6"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    several = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(GPUS), "--num_machines", "1"]
    several += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "29611"]
    scores = []
    for name, launch in (("one", []), ("several", several)):
        command = [sys.executable, *launch, "-m", "qattn_hf.lm_eval", "run", *model, *tasks]
        command += ["--output_path", str(tmp_path / name)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (written,) = (tmp_path / name).rglob("results_*.json")
        scores.append(json.loads(written.read_text()))
    one, all_of_them = scores
    assert all_of_them["config"]["qattn"]["world_size"] == GPUS and one["config"]["qattn"]["world_size"] == 1
    assert all_of_them["n-samples"]["recall_40"]["effective"] == 40
    key = "exact_match,first-number"
    # batches of other rows hold other padding, which a greedy answer at a tie may show: one row of 40
    assert abs(one["results"]["recall_40"][key] - all_of_them["results"]["recall_40"][key]) <= 1 / 40
