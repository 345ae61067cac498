"""Models that are split over processes by tensor parallelism: each packs its own heads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import split_model
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import patch, report
from qattn_hf.methods import get_method
from qattn_hf.model.tensor_parallel import Shard, shard_spec

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 200
UNEVEN = {"bits": "mixed", "n_h": 1}
LISTS = {"bits": "mixed", "k_low_heads": [[0, 1], [2]], "v_low_heads": [[3], []]}


def split(folder: Path, method: str, *settings: dict[str, Any], processes: int = 2) -> list[dict[str, Any]]:
    """Run `split_model.py` in `processes` processes and return its result for each of the settings.

    Where no GPU is, they are forked: each would import all modules.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = [str(folder), method, json.dumps(settings), str(TOKENS)]
    if not torch.cuda.is_available():
        ranks = range(processes)
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        said = [folder / f"said-{rank}" for rank in ranks]
        run = partial(split_model.main, *arguments)
        children = [forked.start(run, said[i], RANK=str(i), LOCAL_RANK=str(i), **shared) for i in ranks]
        first, *_ = [forked.wait(child, text) for child, text in zip(children, said, strict=True)]
        return [json.loads(line) for line in first.splitlines() if line.startswith("{")]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    script = [str(ROOT / "tests" / "split_model.py"), *arguments]
    paths = os.pathsep.join(
        [*(str(ROOT / name) for name in (".", "kernels", "tests")), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *launch, *script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def whole(model: Any, method: str, settings: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits and report of the same model in one process."""
    patch(model, method, **settings)
    wanted = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(random_ids(2, TOKENS).to(model.device), **wanted)
    return torch.stack(out.logits).cpu(), report(model).to_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    four_heads().save_pretrained(path)
    return path


def four_heads() -> Any:
    return tiny_llama(num_attention_heads=8, num_key_value_heads=4, head_dim=16, vocab_size=98)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_parallel_cuda.py does this on GPUs")
@pytest.mark.product
@pytest.mark.parametrize("settings", [{}, LISTS], ids=["4 bits", "lists of heads"])
def test_a_split_model_computes_what_the_whole_one_does(folder: Path, settings: dict[str, Any]):
    """Settings that do not divide are refused, which leaves the model to others."""
    refused, found = split(folder, "turbo", UNEVEN, settings)
    assert "do not divide among 2 processes" in refused["refused"]
    logits, held = whole(four_heads(), "turbo", settings)
    assert found["world_size"] == 2 and found["packed_tokens"] == held["packed_tokens"] > 0
    assert abs(found["kv_bytes"] / held["kv_bytes"] - 0.5) < 0.05, "each process holds its own heads"
    assert (found["decode"], found["decode_reason"]) == ("eager", "the model is on the cpu")
    # sums over processes are added in another order, and codes may fall to the other side of a rounding
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, atol=2e-3, rtol=0)
    for part, all_heads in zip(found["bits_per_head"], held["layers"], strict=True):
        assert part == {side: [row[:2] for row in bits] for side, bits in all_heads["bits_per_head"].items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes on CPUs; test_parallel_cuda.py has those on GPUs")
@pytest.mark.slow
def test_a_split_model_compensates_errors_by_the_queries_of_its_own_heads(folder: Path):
    settings = {"group_size": 32, "residual_length": 0, "compensate_k": True}
    [found] = split(folder, "sinkq", settings)
    shares = [layer["k.compensation"] for layer in patch(four_heads(), "sinkq", **settings)._qattn.constants]
    for own, every in zip(found["constants"], shares, strict=True):
        assert (every[:2] - every[2:]).abs().max() > 0.01  # the other process's heads have others
        torch.testing.assert_close(torch.tensor(own["k.compensation"]).half(), every[:2], atol=1e-3, rtol=0)  # fp16


@pytest.mark.parametrize("smooth", [False, True])
def test_a_part_counts_its_heads_anew(smooth: bool):
    settings = get_method("turbo")(**LISTS, smooth_k=smooth)
    first, second = (shard_spec(settings.layer_spec(0, 2, 4), 4, Shard(rank, 2)) for rank in (0, 1))
    assert first.k.core.low_heads == (0, 1) and second.k.core.low_heads == ()
    assert first.v.core.low_heads == () and second.v.core.low_heads == (1,)
    assert [spec.k.core.n_low for spec in (first, second)] == [2, 0]
    assert first.window == settings.window() and type(first.k) is type(second.k)
    counted = shard_spec(get_method("turbo")(bits="mixed", smooth_k=smooth).layer_spec(0, 2, 4), 4, Shard(1, 2))
    assert counted.k.core.n_low == counted.v.core.n_low == 1
    with pytest.raises(ValueError, match="4 KV heads do not divide among 3"):
        shard_spec(settings.layer_spec(0, 2, 4), 4, Shard(0, 3))
