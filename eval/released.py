"""Quality of settings on released checkpoints, through true decode steps over the packed cache.

    python eval/released.py smollm2 --text WIKITEXT --book BOOK            # fetches the checkpoint's package first
    python eval/released.py FOLDER --text WIKITEXT --book BOOK --methods "turbo;low2;tuned.yaml"
    python eval/record.py released-smollm2 -- python eval/released.py smollm2 ...

Rows of the text are prompts. The tokens after each prompt are fed one by one, and each step's logits are compared with
those of the unpatched model. `none` shows the effect of bf16 rounding alone. A pass key is five digits in the middle of
a book, which the model must repeat at the end. Layers with a sliding window stay unquantized.

Prints one JSON row per setting: KL with its standard error over rows, top-1 agreement, total variation, perplexity,
bits, and how many of 32 pass keys were found.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoints import CHECKPOINTS, fetch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qattn_hf import patch, report, unpatch
from qattn_hf.methods import measured_settings
from qattn_hf.model._compat import CACHE

# Contexts of pass keys, and rows of text. SmolLM2 has 8,192 positions, Gemma 3 270M 32,768.
SHAPES = {
    "smollm2": {"rows": 16, "needles": (1900, 3800, 7600)},
    # of its windows: those packed by a method, which is not the default
    "gemma3": {"rows": 8, "needles": (3800, 15000, 30000), "more": ("turbo:sliding=packed",)},
}
KEYS, KEY_BATCH, LONG, LONG_BATCH = 32, 16, 10_000, 4  # pass keys asked at once; fewer beyond `LONG` tokens
HEAD = "There is important information hidden in the following text. Find it and memorise it.\n\n"
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
TAIL = "\n\nWhat is the pass key?\n\nThe pass key is"


class Task(NamedTuple):
    """What one process measures.

    Attributes:
        folder: of the model.
        text, book: files.
        rows, prompt, steps: sizes of the text.
        needles: contexts of pass keys.
        settings: as for `patch`, or recipe files.
        stock: whether this process measures the unpatched model as well.
        device: where it runs.
    """

    folder: str
    text: str
    book: str
    rows: int
    prompt: int
    steps: int
    needles: tuple[int, ...]
    settings: tuple[str, ...]
    stock: bool
    device: str


class Needle(NamedTuple):
    """A prompt, and the tokens of the pass key that it hides."""

    prompt: list[int]
    key: list[int]


class Model(NamedTuple):
    """A loaded model, and what it is asked.

    Attributes:
        text: int64 `[B, prompt + steps + 1]`. needles: by their context.
    """

    name: str
    module: PreTrainedModel
    text: torch.Tensor
    needles: dict[int, list[Needle]]


def load(task: Task) -> Model:
    """Load the model in bf16 on a GPU, in fp32 on a CPU, and cut its texts."""
    dtype = torch.float32 if task.device == "cpu" else torch.bfloat16
    module = AutoModelForCausalLM.from_pretrained(task.folder, dtype=dtype).to(task.device).eval()
    module.generation_config.eos_token_id, module.generation_config.pad_token_id = None, 0
    tokenizer = AutoTokenizer.from_pretrained(task.folder)
    begin = beginning(tokenizer)

    encoded = encoder(tokenizer)
    length = task.prompt + task.steps + 1 - len(begin)
    ids = encoded(Path(task.text).read_text(encoding="utf-8")[: 8 * length * task.rows])
    rows = [begin + ids[i * length : (i + 1) * length] for i in range(min(task.rows, len(ids) // length))]
    book = encoded(Path(task.book).read_text(encoding="utf-8")) if task.needles else []
    generator = random.Random(5)
    needles = {
        tokens: [needle(encoded, begin, book, tokens, generator) for _ in range(KEYS)] for tokens in task.needles
    }
    return Model(Path(task.folder).name, module, torch.tensor(rows, device=task.device), needles)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return a function that gives the tokens of a text, without special ones."""
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens in front of each text. Gemma was trained with one, and errs much without."""
    begin: list[int] = tokenizer("").input_ids
    return begin


def needle(
    encoded: Callable[[str], list[int]], begin: list[int], book: list[int], tokens: int, generator: random.Random
) -> Needle:
    """Make a prompt of exactly `tokens` tokens: part of the book with the key in its middle, and the question."""
    key = "".join(str(generator.randint(1, 9)) for _ in range(5))
    head, line, tail = map(encoded, (HEAD, NEEDLE.format(key=key), TAIL))
    room = tokens - len(head) - len(line) - len(tail) - len(begin)
    start = generator.randrange(len(book) - room)
    cut = start + int(room * generator.uniform(0.05, 0.9))
    return Needle(begin + head + book[start:cut] + line + book[cut : start + room] + tail, encoded(" " + key))


@torch.inference_mode()
def log_probabilities(model: Model, prompt: int) -> Iterator[torch.Tensor]:
    """Log-probabilities `[B, V]` in fp32 of the token after each step, read through the cache of the model."""
    out = model.module(model.text[:, :prompt], use_cache=True, logits_to_keep=1)
    cache = getattr(out, CACHE)
    for column in range(prompt, model.text.shape[1] - 1):
        step = model.module(model.text[:, column : column + 1], use_cache=True, **{CACHE: cache})
        yield step.logits[:, -1].float().log_softmax(-1)


def perplexity(negative: torch.Tensor) -> float:
    return round(float(negative.mean().exp()), 3)


@torch.inference_mode()
def against(model: Model, full: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Compare a patched model with the log-probabilities `[B, steps, V]` of the unpatched model."""
    read = []
    for step, theirs in enumerate(log_probabilities(model, prompt)):
        own, target = full[:, step], model.text[:, prompt + step + 1, None]
        read.append(
            torch.stack(
                [
                    (own.exp() * (own - theirs)).sum(-1),
                    -theirs.gather(1, target)[:, 0],
                    (own.argmax(-1) == theirs.argmax(-1)).float(),
                    (own.exp() - theirs.exp()).abs().sum(-1) / 2,
                ],
                -1,
            )
        )
    kl, negative, same, variation = torch.stack(read, 1).unbind(-1)
    by_row = kl.mean(1)
    return {
        "kl": round(float(by_row.mean()), 5),
        "kl_se": round(float(by_row.std() / len(by_row) ** 0.5), 5),
        "kl_largest": round(float(kl.max()), 3),
        "same_top1": round(float(same.mean()), 4),
        "total_variation": round(float(variation.mean()), 4),
        "ppl": perplexity(negative),
    }


@torch.inference_mode()
def found_keys(model: Model) -> dict[str, int]:
    """How many of `KEYS` pass keys the model answers, by context."""
    found = {}
    for tokens, needles in model.needles.items():
        right, batch = 0, LONG_BATCH if tokens > LONG else KEY_BATCH
        for start in range(0, len(needles), batch):
            asked = needles[start : start + batch]
            ids = torch.tensor([each.prompt for each in asked], device=model.text.device)
            out = model.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)
            answers = out[:, tokens:].tolist()
            right += sum(a[: len(n.key)] == n.key for a, n in zip(answers, asked, strict=True))
        found[f"pass_key_{tokens}"] = right
    return found


def figures(model: Model, setting: str, full: torch.Tensor, prompt: int) -> dict[str, Any]:
    """The row of one setting; where it fails, the error in its place."""
    given = {"recipe": setting} if setting.endswith(".yaml") else {"method": setting}
    try:
        patch(model.module, **given)
        row = against(model, full, prompt)
        held = report(model.module).to_dict()
        row |= {
            "bits": round(held["effective_bits"], 3),
            "bits_total": round(held["effective_bits_total"], 3),
            "impl": held["impl"],
        }
        return row | found_keys(model)
    except Exception as error:  # a row says that the setting failed, the others go on
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if hasattr(model.module, "_qattn"):
            unpatch(model.module)


def measure(task: Task) -> int:
    """Print the row of each setting of a task when it is measured; return how many failed."""
    model, failed = load(task), 0
    full = torch.stack(list(log_probabilities(model, task.prompt)), 1)
    shape = {"model": model.name, "rows": len(model.text), "prompt": task.prompt, "steps": task.steps}
    if task.stock:
        negative = -full.gather(2, model.text[:, task.prompt + 1 :, None])
        _print({**shape, "setting": "full precision", "ppl": perplexity(negative), **found_keys(model)})
    for setting in task.settings:
        began = time.perf_counter()
        row = figures(model, setting, full, task.prompt)
        failed += "error" in row
        _print({**shape, "setting": setting, **row, "seconds": round(time.perf_counter() - began, 1)})
        gc.collect()
        if model.text.is_cuda:
            torch.cuda.empty_cache()
    return failed


def _print(row: dict[str, Any]) -> None:
    """Print a row in one write, since processes share the output."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def tasks(options: argparse.Namespace, folder: str) -> list[Task]:
    """Deal the settings out to processes: steps of a small model wait for the host, so several share a GPU."""
    shape: dict[str, Any] = SHAPES.get(options.model, {"rows": 16, "needles": ()})
    needles = shape["needles"] if options.needles is None else options.needles
    worth = (*measured_settings("released"), *shape.get("more", ()))
    settings = [one for one in options.methods.split(";") if one] or worth
    count = max(1, min(options.processes, len(settings)))
    return [
        Task(
            folder,
            str(options.text),
            str(options.book),
            options.rows or shape["rows"],
            options.prompt,
            options.steps,
            tuple(needles),
            tuple(settings[first::count]),
            first == 0,
            f"cuda:{first % gpus}" if (gpus := torch.cuda.device_count()) else "cpu",
        )
        for first in range(count)
    ]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KL, top-1, perplexity, bits and pass keys on a released checkpoint.")
    parser.add_argument("model", help=f"{', '.join(CHECKPOINTS)}, or a folder that from_pretrained loads")
    parser.add_argument("--text", type=Path, required=True, help="plain text to read, such as WikiText-2's test part")
    parser.add_argument("--book", type=Path, required=True, help="plain text in which pass keys are hidden")
    parser.add_argument("--methods", default="", help="settings with ; between; default: all worth measuring")
    parser.add_argument("--rows", type=int, help="rows of the text; default 16, of Gemma 8")
    parser.add_argument("--prompt", type=int, default=3072, help="tokens of a row that are read at once")
    parser.add_argument("--steps", type=int, default=384, help="tokens after them, each a step")
    parser.add_argument(
        "--needles", type=lambda text: tuple(int(one) for one in text.split(",") if one), help="contexts of pass keys"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes, on all GPUs in turn")
    parser.add_argument("--folder", type=Path, help="where a fetched checkpoint is kept; default: a temporary folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if options.model in CHECKPOINTS:
            kept = options.folder or Path(scratch) / CHECKPOINTS[options.model].name
            folder = str(kept if (kept / "config.json").is_file() else fetch(options.model, kept))
        work = tasks(options, folder)
        with ProcessPoolExecutor(len(work), mp_context=get_context("spawn")) as pool:
            failed = sum(pool.map(measure, work))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
