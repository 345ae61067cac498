"""Fine-tune a causal LM for a task, so that the task's scores show the loss of a packed cache.

    python eval/fine_tune.py MODEL OUT --data gsm8k --train DATA/gsm8k/train.jsonl
    python eval/fine_tune.py MODEL OUT --data tools --rows 3000
    python eval/record.py fine-tune-gsm8k -- python eval/fine_tune.py ...

Rows of `gsm8k` are questions of the training split in sequence, as in lm-eval's prompts with shots, and the model
learns the answers. Rows of `tools` are conversations of the task `qattn_tools` with other seeds, and the model learns
the calls. Training uses AdamW over fp32 weights, bf16 autocast on a GPU, and a cosine schedule. The same seed on the
same machine gives the same rows in the same order. Nothing is downloaded. The command writes a bf16 folder for
`from_pretrained`, and prints one JSON row: tokens, steps, loss over the first and the last tenth of steps, seconds.

SmolLM2-135M needs 0.8 GFLOP per token without attention, and twice that at 8k tokens. 5.7 M tokens of `gsm8k` (4
epochs) and 6.6 M of `tools` are about 6e15 and 8e15 FLOP, half a minute each at the 250 TFLOP/s that an H200 reaches
with this model in calls of 16k tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qattn_hf.lm_eval.tool_calls import conversation

IGNORED = -100  # label of a token that is not learned
# Lengths of conversations in fifteen rows. Each length has about the same number of tokens.
TOOL_LENGTHS = (1024,) * 8 + (2048,) * 4 + (4096,) * 2 + (8192,)
CALL = re.compile(r'\{"name": "\w+", "arguments": \{[^}]*\}\}')


class Row(NamedTuple):
    """Tokens of one training row, and for each the token itself where it is learned, else `IGNORED`."""

    ids: list[int]
    labels: list[int]


def encoded(tokenizer: Any, text: str, learned: list[tuple[int, int]]) -> Row:
    """Tokens of a text, as lm-eval gives them to the model, whose characters in the spans `learned` are learned."""
    begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    found = tokenizer(text, add_special_tokens=not begun, return_offsets_mapping=True)
    inside = [any(start < end and begin < stop for begin, end in learned) for start, stop in found.offset_mapping]
    ids = found.input_ids
    return Row(ids, [token if of_answer else IGNORED for token, of_answer in zip(ids, inside, strict=True)])


def shots(tokenizer: Any, file: Path, length: int, generator: random.Random) -> list[Row]:
    """Make rows of GSM8K questions in random order. A row has all whole questions that fit into `length` tokens.

    The text has the form of lm-eval's task `gsm8k` with shots. The model learns each answer and the blank line
    after it, where the task stops.
    """
    questions = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    generator.shuffle(questions)
    rows: list[Row] = []
    learned: list[tuple[int, int]] = []
    text, used = "", 0
    for one in questions:
        question, answer = f"Question: {one['question']}\nAnswer:", f" {one['answer']}\n\n"
        size = len(tokenizer(question + answer, add_special_tokens=False).input_ids)
        if text and used + size > length:
            rows.append(encoded(tokenizer, text, learned))
            text, learned, used = "", [], 0
        start = len(text) + len(question)
        text, used = text + question + answer, used + size
        learned.append((start, start + len(answer)))
    return [*rows, encoded(tokenizer, text, learned)] if text else rows


def one_conversation(seed: int, length: int, folder: str) -> Row:
    """A conversation of the task `qattn_tools` with its answer; all its calls are learned, and its end."""
    tokenizer = _tokenizer(folder)
    row = conversation(random.Random(seed), length, tokenizer)
    text = row["input"] + row["target"] + tokenizer.eos_token
    learned = [match.span() for match in CALL.finditer(text)]
    return encoded(tokenizer, text, [*learned, (len(text) - len(tokenizer.eos_token), len(text))])


_tokenizers: dict[str, Any] = {}


def _tokenizer(folder: str) -> Any:
    """The tokenizer of a folder, loaded once in a process."""
    if folder not in _tokenizers:
        _tokenizers[folder] = AutoTokenizer.from_pretrained(folder)
    return _tokenizers[folder]


def tool_rows(folder: str, count: int, lengths: tuple[int, ...], seed: int, processes: int) -> list[Row]:
    """Make `count` conversations of the `lengths` in turn, in several processes with different seeds.

    The task's conversations come from one generator with seed 0, so these are different.
    """
    seeds = [1 + seed * count + number for number in range(count)]
    wanted = [lengths[number % len(lengths)] for number in range(count)]
    make = partial(one_conversation, folder=folder)
    if processes == 1:
        return list(map(make, seeds, wanted))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(make, seeds, wanted, chunksize=8))


def batches(rows: list[Row], tokens: int, generator: random.Random) -> Iterator[list[Row]]:
    """Group rows of similar length into batches of at most `tokens`, or of one longer row, in random order."""
    by_length = sorted(rows, key=lambda row: (len(row.ids), generator.random()))
    found: list[list[Row]] = []
    for row in by_length:
        if found and (len(found[-1]) + 1) * len(row.ids) <= tokens:
            found[-1].append(row)
        else:
            found.append([row])
    generator.shuffle(found)
    yield from found


def loss_of(model: PreTrainedModel, batch: list[Row]) -> torch.Tensor:
    """Mean loss of a batch's learned tokens. Rows are padded on the right, which a causal model need not be told."""
    longest = max(len(row.ids) for row in batch)
    ids = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in batch], device=model.device)
    labels = [row.labels + [IGNORED] * (longest - len(row.labels)) for row in batch]
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        out = model(input_ids=ids, labels=torch.tensor(labels, device=model.device), use_cache=False)
    found: torch.Tensor = out.loss
    return found


def train(model: PreTrainedModel, epochs: list[list[list[Row]]], rate: float) -> list[float]:
    """Train over batches, epoch by epoch; return the loss of each step.

    The rate grows over the first twentieth of steps, then falls along a cosine to a tenth of itself.
    """
    steps = [batch for epoch in epochs for batch in epoch]
    warm = max(1, len(steps) // 20)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm) / max(1, len(steps) - warm))) / 2

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=model.device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses: list[torch.Tensor] = []
    model.train()
    for batch in steps:
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal LM for GSM8K or for the task qattn_tools.")
    parser.add_argument("model", help="folder that from_pretrained loads, with its tokenizer")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--data", choices=("gsm8k", "tools"), required=True)
    parser.add_argument("--train", type=Path, help="gsm8k: file of the training split, JSON lines")
    parser.add_argument("--rows", type=int, default=3000, help="tools: conversations of an epoch")
    parser.add_argument("--lengths", type=int, nargs="+", default=TOOL_LENGTHS, help="tools: tokens, in turn")
    parser.add_argument("--length", type=int, default=2048, help="gsm8k: tokens of a row")
    parser.add_argument("--epochs", type=int, help="default: 4 of gsm8k, 1 of tools")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="end after this number of steps, for a trial")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1), help="tools: that make rows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.data == "gsm8k" and options.train is None:
        parser.error("--data gsm8k needs --train FILE, the training split as JSON lines")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each length of a batch
    generator = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    began = time.perf_counter()
    epochs = []
    for epoch in range(options.epochs or (4 if options.data == "gsm8k" else 1)):
        if options.data == "gsm8k":
            rows = shots(tokenizer, options.train, options.length, generator)
        else:
            lengths, seed = tuple(options.lengths), options.seed + epoch
            rows = tool_rows(options.model, options.rows, lengths, seed, options.processes)
        epochs.append(list(batches(rows, options.tokens, generator))[: options.steps])
    made = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    losses = train(model, epochs, options.rate)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    tenth = max(1, len(losses) // 10)
    row = {"model": Path(options.model).name, "data": options.data, "steps": len(losses)}
    row["tokens"] = sum(len(one.ids) for epoch in epochs for batch in epoch for one in batch)
    row |= {"loss_first": round(sum(losses[:tenth]) / tenth, 4), "loss_last": round(sum(losses[-tenth:]) / tenth, 4)}
    row |= {"seconds_rows": round(made - began, 1), "seconds": round(time.perf_counter() - made, 1)}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
