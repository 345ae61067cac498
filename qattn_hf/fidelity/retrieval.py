"""Count values in a long text that full precision finds and a packed cache loses.

A model reads a text in chunks through the cache. A question follows in a separate call. Its answer is written greedily,
token by token, so every token of question and answer reads packed blocks. The same questions are asked in full
precision.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.sizes import size_of
from qattn_hf.fidelity.compare import Progress, Row, check_full, check_packed, packed
from qattn_hf.fidelity.needles import Prompt, PromptMaker
from qattn_hf.fidelity.rollout import GREEDY, roll_out
from qattn_hf.messages.console import print_figures, results_console
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import CHUNK, cuts, feed
from qattn_hf.recipes.recipe import Recipe

FULL = "full precision"  # value of `method` in its rows


class Found(NamedTuple):
    """For each value that a prompt asks for: whether the answer has it, and its depth in the text in per cent."""

    hits: list[bool]
    depths: list[float]


def compare_retrieval(
    model: PreTrainedModel,
    maker: PromptMaker,
    recipes: dict[str, Recipe],
    prompts: Sequence[Prompt],
    *,
    chunk: int = CHUNK,
    at_tokens: int = 4096,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Compare how many values a model finds in long texts through packed caches and in full precision.

    Args:
        model: unpatched model. It is left unchanged.
        maker: maker of the prompts, with the model's tokenizer.
        recipes: recipes by name, as `find_recipes` makes them.
        prompts: as `needles.all_prompts` makes them. Each is read once for each recipe and once in full precision.
        chunk: tokens of a call that reads a text.
        at_tokens: context length for which bits are counted.
        dtype: precision in which the model will run, if it differs from the measured one. Bits are counted in it.
        progress: called with a text before each step.

    Returns:
        For each kind and length of the prompts, a dict for `full precision`, then a dict for each recipe. Keys are
        `method`, `kind`, `length`, `answers` (number of values asked for), `score` (share found) and `by_depth` (share
        found at each depth in per cent). Recipes also have `lost` (values that only full precision found), `won`
        (values that only the cache found), and bits.

    Raises:
        QAttnError: a recipe packed nothing, a prompt is longer than the model's context, or the model is patched.
    """
    longest = max(prompt.length for prompt in prompts)
    check_full(model, longest, f"prompts of {longest} tokens", "shorter ones")
    recipes = {name: recipe.for_model(model.config) for name, recipe in recipes.items()}
    found: dict[tuple[str, int], dict[str, list[Found]]] = {}
    bits: dict[str, Row] = {}
    for i, prompt in enumerate(prompts, 1):
        what = f"prompt {i} of {len(prompts)}, {prompt.kind}, {prompt.length} tokens"
        group = found.setdefault((prompt.kind, prompt.length), {name: [] for name in (FULL, *recipes)})
        progress(f"{what}: {FULL}")
        group[FULL].append(_found(prompt, answers(model, maker, prompt, chunk)[0]))
        for name, recipe in recipes.items():
            progress(f"{what}: {name}")
            with packed(model, recipe):
                texts, cache = answers(model, maker, prompt, chunk)
                check_packed(cache, name, prompt.length, "take longer prompts")
            group[name].append(_found(prompt, texts))
            if name not in bits:
                bits[name] = _bits(cache, at_tokens, dtype or model.dtype)
            del cache  # the caches of two long texts may not fit the device
    rows = []
    for (kind, length), by_name in found.items():
        full = by_name[FULL]
        for name, of_cache in by_name.items():
            asked = {"method": recipes[name].method, **recipes[name].given()} if name in recipes else None
            about = {"method": name, **({"recipe": asked} if asked else {}), "kind": kind, "length": length}
            more = {**lost_won(full, of_cache), **bits[name]} if asked else {}
            rows.append({**about, "chunk": chunk, **scores(of_cache), **more})
    return rows


def answers(model: PreTrainedModel, maker: PromptMaker, prompt: Prompt, chunk: int = CHUNK) -> tuple[list[str], Any]:
    """Answer the questions of a prompt greedily. Returns the answers, and the cache with the prompt's text.

    Args:
        model: patched or unpatched model.
        chunk: tokens of a call that reads the text.
    """
    ids = torch.tensor([prompt.context], device=device_of(model))
    for part in feed(model, ids, cuts(ids.shape[1], chunk)):
        cache = part.cache
    texts = []
    for question in prompt.questions:
        # copy the cache, so the next question does not read this question and its answer
        asked = cache if prompt.chained else copy.deepcopy(cache)
        written = roll_out(model, torch.tensor([question.ids], device=ids.device), question.room, GREEDY, cache=asked)
        texts.append(maker.tokenizer.decode(written.ids[0]))
    return texts, cache


def _found(prompt: Prompt, texts: list[str]) -> Found:
    """Find the expected values in the answers. A value must be a whole number of the answer."""
    hits: list[bool] = []
    for question, text in zip(prompt.questions, texts, strict=True):
        written = re.findall(r"\d+", text)
        hits += [value in written for value in question.values]
    return Found(hits, [depth for question in prompt.questions for depth in question.depths])


def scores(found: Sequence[Found]) -> Row:
    """Return `answers` (their number), `score` (share of values found) and `by_depth` (that share at each depth)."""
    by_depth: dict[float, list[bool]] = {}
    for hit, depth in ((hit, depth) for one in found for hit, depth in zip(one.hits, one.depths, strict=True)):
        by_depth.setdefault(depth, []).append(hit)
    hits = [hit for one in found for hit in one.hits]
    return {
        "answers": len(hits),
        "score": sum(hits) / len(hits),
        "by_depth": {f"{depth:g}": sum(at) / len(at) for depth, at in sorted(by_depth.items())},
    }


def lost_won(full: Sequence[Found], of_cache: Sequence[Found]) -> Row:
    """Return `lost`, values that only full precision found, and `won`, values that only the cache found."""
    pairs = [pair for one, other in zip(full, of_cache, strict=True) for pair in zip(one.hits, other.hits, strict=True)]
    return {"lost": sum(a and not b for a, b in pairs), "won": sum(b and not a for a, b in pairs)}


def _bits(cache: QAttnCache, at_tokens: int, dtype: torch.dtype) -> Row:
    size = size_of(cache, at_tokens, dtype)
    return {
        "at_tokens": at_tokens,
        "effective_bits": size.effective_bits,
        "effective_bits_total": size.effective_bits_total,
    }


def retrieval_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Format results of `compare_retrieval` as a header and lines of text.

    A line is a method, a column is a kind and length. A cell is the share of values found, for caches with the values
    lost and won. The last columns are the total lost of the values that full precision found, and bits.
    """
    columns = list(dict.fromkeys((row["kind"], row["length"]) for row in rows))
    lines: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        lines.setdefault(row["method"], {})[row["kind"], row["length"]] = row

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        return f"{row['score']:.3f}" + (f" -{row['lost']} +{row['won']}" if "lost" in row else "")

    full = lines.get(FULL, {})
    right = sum(round(row["score"] * row["answers"]) for row in full.values())

    def ending(found: dict[tuple[str, int], Row]) -> list[str]:
        if found is full:
            return ["", ""]
        lost, first = sum(row["lost"] for row in found.values()), next(iter(found.values()))
        return [f"{lost} of {right}", f"{first['effective_bits_total']:.2f}"]

    header = ["method", *(f"{kind}, {length}" for kind, length in columns), "lost", "bits, all"]
    return header, [
        [method, *(cell(found.get(column)) for column in columns), *ending(found)] for method, found in lines.items()
    ]


def print_retrieval(rows: list[Row], wide: bool = False) -> None:
    """Print the results of `compare_retrieval` as a table, with an explanation of its columns.

    Args:
        rows: as `compare_retrieval` returns them, each with the keys `model`, a name, and `template`.
        wide: whether to keep cells unfolded in a narrow terminal.
    """
    console, first, (header, lines) = results_console(), rows[0], retrieval_table(rows)
    depths = ", ".join(first["by_depth"])
    console.print(
        f"{first['model']}: values found in texts of template {first['template']}, {first['answers']} asked for in "
        f"each column, at depths of {depths} per cent; texts read in calls of {first['chunk']} tokens"
    )
    print_figures(header, lines, ["method"], wide)
    console.print(
        "Share found. -: values that only full precision found, +: values that only the cache found. Lost: share of "
        "full precision's values that the cache did not find. Bits: per value, everything counted, "
        f"at {rows[-1]['at_tokens']} tokens."
    )
