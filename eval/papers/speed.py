"""Figures of speed and memory: the command that makes each on a machine with a GPU, and the recorded numbers.

TurboAttention Fig. 6 and 7a; SinkQ Fig. 3 and 7; INT-FlashAttention Fig. 2; SageAttention2 Table 12; sparse V 4.2, 4.6,
4.7, 7.2 and 7.3. `speedup` is the time of PyTorch's fastest attention divided by the method's, from `eval/results/`.

Fails if TurboAttention's recorded decode is not faster than every attention of PyTorch at 32k tokens and a batch of 4,
where its Fig. 6 has a gain, or if its gain does not grow with the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from papers.common import About, Claim, Row, Run, column, not_below, row, sources
from recorded import spelled_now

from qattn_hf.bench.tables import gains

ABOUT = About(
    title="Figures of speed",
    model="",
    missing="the papers measure an A100, an A800, an RTX4090, an L20, and Apple's M2 and M5; each record names its "
    "GPU. Whole models of the papers, and the kernels of GEAR and KIVI, are not measured. This table has neither SAS "
    "nor sparse V, which makes steps 22 to 58 % slower (`speed-sparse-v.json`). TurboAttention 5.5 says that "
    "dequantized caches decode slower than FP16. Ours decode faster: `kivi:bits=4,group_size=128` is 1.1 to 3.5 "
    "times as fast as cuDNN (`speed-decode.json`). Throughput here is for single rows; Speed has batches that fill a "
    "memory (TurboAttention, Fig. 7a; SinkQ, Fig. 3). Not measured: shares of latency (TurboAttention, Fig. 1; "
    "SinkQ, Fig. 7), a fused QKV projection, attention without a mask, the cost of smoothing per step, and the skip "
    "rate of sparse V by layer.",
)
RESULTS = Path(__file__).resolve().parent.parent / "results"
DECODE, PREFILL, GENERATE = "qattn bench decode", "qattn bench prefill", "qattn bench generate"
POINTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "TurboAttention, Fig. 6, decode": (f"{DECODE} --method turbo:sink_num=0", {"speedup, at most": 1.7}),
    "TurboAttention, Fig. 6, prefill": (f"{PREFILL} --method turbo:sink_num=0", {"speedup, at most": 1.8}),
    "TurboAttention, Fig. 7a": (GENERATE, {"throughput, at most": 2.37}),
    "SinkQ, Fig. 3": (f"{DECODE} --method sinkq", {"throughput, at most": 2.3, "peak memory, at most": 6.4}),
    "INT-FlashAttention, Fig. 2": (
        f"{PREFILL} --method int_flash",
        {"less time, per cent, 1k to 16k": (31, 52, 66, 72, 73)},
    ),
    "SageAttention2, Table 12, Llama3.1": (
        f"{PREFILL} --method sage2 --method sage2:bits=4",
        {"48k, RTX4090, s": (9.2, 5.7, 5.6), "100k, L20, s": (39.9, 25.4, 23.2)},  # original, 8b, 4b
    ),
    "Sparse V, 4.2, 4.6, 4.7, 7.2 and 7.3": (
        f"{DECODE} --method turboquant:k_format=turbo3,v_format=turbo3,sparse_v_tau=1e-6",
        {"decode, per cent, short to 32k": (1.4, 4.0, 7.2, 12.9, 22.8), "prefill at 4k, per cent": 2.8},
    ),
}
PAPER_TURBO = "turbo:sink_num=0"
WAYS = (PAPER_TURBO, "sinkq", "int_flash", "sage2", "sage2:bits=4", "turboquant:k_format=turbo3,v_format=turbo3")
TIMED = (PAPER_TURBO, "int_flash", "sage2", "sage2:bits=4")  # whose papers time a prefill
BATCH, LONG, SHORT = 4, 32768, 2048


def recorded(bench: str, *point: str) -> Iterator[Row]:
    """Of each recorded point, by batch and tokens, and method of the papers, the fastest attention of PyTorch by it."""
    path = RESULTS / f"speed-{bench}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
    tight = [one for one in spelled_now(found)["rows"] if one.get("room", 1) == 1]
    for (batch, tokens), ways in gains(tight, *point).items():
        for way in (way for way in WAYS if way in ways):
            source = f"recorded {bench}, {way}, batch {batch}, {found['device']}"
            yield row(source, f"{tokens} tokens", {}, {"speedup": ways[way]})


def measure(run: Run | None) -> Iterator[Row]:
    for figure, (command, paper) in POINTERS.items():
        yield row("papers", figure, paper, {"command": command})
    yield from recorded("decode", "batch", "context")
    yield from recorded("prefill", "batch", "tokens")


def broken(rows: list[Row]) -> list[str]:
    begin = f"recorded decode, {PAPER_TURBO}, batch {BATCH},"
    source = next((r["source"] for r in rows if r["source"].startswith(begin)), None)
    if source is None:
        return ["nothing is recorded: python eval/gpu.py --only decode, on a machine with a GPU"]
    speedup = {**column(rows, source, "speedup"), "PyTorch's": 1.0}
    long, short = (f"{tokens} tokens" for tokens in (LONG, SHORT))
    if missing := {long, short} - set(speedup):
        return [f"{source}: {', '.join(sorted(missing))} is not recorded"]
    return not_below(speedup, [("PyTorch's", long), (short, long)], source)


def slower(rows: list[Row]) -> list[str]:
    """Recorded prefills, of the methods whose papers time one, that take more time than the fastest of PyTorch."""
    found: dict[str, list[str]] = {}
    for source in (source for source in sources(rows) if source.startswith("recorded prefill, ")):
        _, way, batch, device = source.split(", ", 3)
        slow = {setting: times for setting, times in column(rows, source, "speedup").items() if times < 1}
        if way in TIMED:
            rows_of = batch.removeprefix("batch ")
            points = [f"{times:.2f}x at {rows_of} x {at}" for at, times in slow.items()]
            found.setdefault(f"{way}, {device}", []).extend(points)
    return [f"{name}: {', '.join(points)}" for name, points in found.items() if points]


CLAIMS = (
    Claim(
        "a prefill takes less time than attention in 16 bits at every length (TurboAttention, Fig. 6; "
        "INT-FlashAttention, Fig. 2; SageAttention2, Figs 8 to 11)",
        slower,
        "the papers compare with FlashAttention or xformers, we with PyTorch's fastest attention, cuDNN's on Hopper. "
        "In short prompts, quantizing costs more than the faster products save",
    ),
)
