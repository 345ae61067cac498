"""Training text of the demo model: documents, tokenizer and packed rows (used by train_demo_model.py)."""

from __future__ import annotations

import lzma
import multiprocessing
import random
import string
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from qattn_hf.assets.demo_tasks import NAMES, PLACES, THINGS, ask, registry, registry_text, step, sum_prompt, sums

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"  # ids 0, 1, 2
MIX = {"books": 0.30, "sums": 0.26, "recall": 0.22, "copy": 0.18, "drill": 0.04}  # shares of all tokens
PIECE = 3000  # characters of prose in one document, rounded up to whole paragraphs


def load_text(source: str) -> str:
    """Running text of a local file (plain or .xz), or the `text` column of a hub data set's train split."""
    path = Path(source)
    if path.is_file():
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            return file.read()
    from datasets import load_dataset

    return "\n\n".join(load_dataset(source, split="train")["text"])


def pieces(text: str) -> list[str]:
    """Cut prose into documents of whole paragraphs, `PIECE` characters or a little more each."""
    out, held, size = [], [], 0
    for paragraph in text.split("\n\n"):
        held.append(paragraph)
        size += len(paragraph)
        if size >= PIECE:
            out.append("\n\n".join(held))
            held, size = [], 0
    return out + (["\n\n".join(held)] if size else [])


def sums_document(rng: random.Random) -> str:
    """One to nine worked sums: zero shots and few shots look alike."""
    return "\n\n".join(f"{sum_prompt(q)} {a}" for q, a in (sums(rng) for _ in range(rng.choice((1, 1, 2, 3, 5, 9)))))


def drill_document(rng: random.Random) -> str:
    """Bare operations, dense in the digits that a sum must get right."""
    lines = []
    for _ in range(rng.randint(5, 30)):
        value = rng.randint(1, 300)
        op, n, result = step(rng, value)
        lines.append(f"{value} {op} {n} = {result}.")
    return " ".join(lines)


def recall_document(rng: random.Random) -> str:
    """A registry of 5 to 40 pairs (at times 100), then questions on several of its names."""
    pairs = registry(rng, rng.randint(41, 100) if rng.random() < 0.05 else rng.randint(5, 40))
    asked = rng.choices(list(pairs), k=rng.randint(5, 20))
    return registry_text(pairs) + "\n".join(f"{ask(name)} {pairs[name]}" for name in asked)


def copy_document(rng: random.Random) -> str:
    """A list said twice: words, letter strings, numbers or name-number pairs."""
    n = rng.randint(5, 60)
    kind = rng.randrange(4)
    if kind == 0:
        items = rng.choices(NAMES + THINGS + PLACES, k=n)
    elif kind == 1:
        items = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 7))) for _ in range(n)]
    elif kind == 2:
        items = [str(rng.randint(0, 9999)) for _ in range(n)]
    else:
        body = registry_text(registry(rng, rng.randint(5, 40))).removeprefix("Registry:")
        return f"Registry:{body}Again:{body}".strip()
    return f"List: {' '.join(items)}\nAgain: {' '.join(items)}"


DOCUMENTS = {"sums": sums_document, "drill": drill_document, "recall": recall_document, "copy": copy_document}


def train_tokenizer(prose: list[str], rng: random.Random, vocab_size: int) -> Tokenizer:
    """Byte-level BPE with digits apart; `<|bos|>` is put before every encoded text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    sample = rng.sample(prose, min(len(prose), 4000))
    sample += [make(rng) for make in DOCUMENTS.values() for _ in range(len(sample) // 8)]
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
    )
    return tokenizer


class RowMaker:
    """Makes one batch of packed rows from its index alone: the same seed gives the same rows on any machine."""

    def __init__(self, tokenizer: str, prose: list[np.ndarray], rows: int, row_tokens: int, seed: int):
        self.tokenizer, self.prose = Tokenizer.from_str(tokenizer), prose
        self.rows, self.row_tokens, self.seed = rows, row_tokens, seed
        self.bos, self.eos = (self.tokenizer.token_to_id(t) for t in (BOS, EOS))

    def document(self, kind: str, rng: random.Random) -> np.ndarray:
        if kind == "books":
            return rng.choice(self.prose)
        text = DOCUMENTS[kind](rng)
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)

    def batch(self, index: int) -> np.ndarray:
        """[rows, row_tokens] uint16; each row starts with `<|bos|>`, documents end with `<|eos|>`."""
        rng = random.Random(f"{self.seed}/{index}")
        wanted = self.rows * (self.row_tokens - 1)
        documents = []
        for kind, share in MIX.items():
            left = int(wanted * share) + 1
            while left > 0:
                documents.append(np.append(self.document(kind, rng), np.uint16(self.eos)))
                left -= len(documents[-1])
        rng.shuffle(documents)
        body = np.concatenate(documents)[:wanted].reshape(self.rows, -1)
        return np.pad(body, ((0, 0), (1, 0)), constant_values=self.bos)


_maker: RowMaker  # one a worker process


def _start(*args) -> None:
    global _maker
    _maker = RowMaker(*args)


def _batch(index: int) -> np.ndarray:
    return _maker.batch(index)


def batches(maker_args: tuple, workers: int, ahead: int = 256) -> Iterator[np.ndarray]:
    """Batches 0, 1, 2, ... in order, made by `workers` processes up to `ahead` of their use."""
    with multiprocessing.Pool(workers, _start, maker_args) as pool:
        pending = deque(pool.apply_async(_batch, (i,)) for i in range(ahead))
        for index in range(ahead, 1 << 62):
            pending.append(pool.apply_async(_batch, (index,)))
            yield pending.popleft().get()
