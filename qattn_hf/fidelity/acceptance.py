"""Draft acceptance: how many of a draft model's tokens a model accepts where one or both read a packed cache.

In greedy speculative decoding (Leviathan et al. 2023, Algorithm 1) a draft's token is accepted where it is the token
that the model writes itself. Errors of a cache lower that: a draft in full precision guesses what full precision would
write. The text stays the model's own, so acceptance changes speed alone.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import Progress, Row, packed
from qattn_hf.fidelity.rollout import GREEDY, check_rollout, roll_out
from qattn_hf.messages.console import print_figures, results_console
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.recipes.recipe import Recipe

SIDES = ("model", "draft", "both")  # which of the two read a packed cache


def compare_drafts(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    recipes: dict[str, Recipe],
    prompts: torch.Tensor,
    tokens: int = 256,
    drafted: int = 5,
    *,
    batch: int = 4,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Compare how many drafted tokens are accepted with packed caches and in full precision.

    Args:
        model, draft: not patched, with one vocabulary; they are left as they were.
        recipes: recipes by name, of `model`, of `draft`, and of both.
        prompts: int64 `[rows, P]`, without padding. tokens: written after each, greedily. drafted: before each
            verification. batch: rows at once. progress: called with a text before each step.

    Returns:
        one dict a recipe, and one before them, `full precision`: `method`, `accepted`, the share of drafted tokens, a
        number for each of `SIDES`, and `per_call`, tokens that a call of the model yields on average, likewise.

    Raises:
        QAttnError: other vocabularies, too long texts, or a patched model.
    """
    if (mine := model.config.get_text_config().vocab_size) != (other := draft.config.get_text_config().vocab_size):
        raise QAttnError(
            f"the model has a vocabulary of {mine} tokens and the draft one of {other}: take one of its own"
        )
    for each in (model, draft):
        check_rollout(each, prompts.shape[1], tokens)
    hits: dict[tuple[str, str], list[torch.Tensor]] = {}
    for row in range(0, len(prompts), batch):
        prompt = prompts[row : row + batch]
        progress(f"rows {row + 1} to {row + len(prompt)}: full precision")
        full = roll_out(model, prompt, tokens, GREEDY).ids
        guesses = guessed(draft, prompt, full)
        hits.setdefault(("full precision", "model"), []).append((guesses == full).cpu())
        for name, recipe in recipes.items():
            progress(f"rows {row + 1} to {row + len(prompt)}: {name}")
            with packed(model, recipe):
                written = roll_out(model, prompt, tokens, GREEDY).ids
            of_written = guessed(draft, prompt, written)
            with packed(draft, recipe):
                pairs = {
                    "model": (of_written, written),
                    "draft": (guessed(draft, prompt, full), full),
                    "both": (guessed(draft, prompt, written), written),
                }
            for side, (guess, truth) in pairs.items():
                hits.setdefault((name, side), []).append((guess == truth).cpu())
    given = {"rows": len(prompts), "prompt": prompts.shape[1], "tokens": tokens, "drafted": drafted}
    rows = []
    for name in ("full precision", *recipes):
        found = {side: acceptance(torch.cat(hits[name, side]), drafted) for side in SIDES if (name, side) in hits}
        shares, yields = ({side: pair[i] for side, pair in found.items()} for i in range(2))
        rows.append({"method": name, **given, "accepted": shares, "per_call": yields})
    return rows


def guessed(draft: PreTrainedModel, prompt: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The draft's likeliest token, int64 `[B, N]`, at each place of a continuation `[B, N]` of prompts `[B, P]`, which
    it reads token by token as a draft does."""
    device, length = device_of(draft), prompt.shape[1]
    ids = torch.cat([prompt.to(device), text.to(device)[:, :-1]], 1)
    at = [*cuts(length), *range(length + 1, ids.shape[1] + 1)]
    found = [chunk.logits[:, -1].argmax(-1) for chunk in feed(draft, ids, at)]
    return torch.stack(found[-text.shape[1] :], 1).to(text.device)


def acceptance(hits: torch.Tensor, drafted: int) -> tuple[float, float]:
    """Share of drafted tokens that are accepted, and tokens of each call of the model, with `drafted` before each.

    A call yields the accepted tokens, those before the first wrong one, and one of the model's own behind them.

    Args:
        hits: bool `[rows, N]`, whether the draft guesses a token right.
    """
    accepted = calls = tried = written = 0
    for row in hits.tolist():
        place = 0
        while place < len(row):
            run = row[place : place + drafted]
            right = next((i for i, hit in enumerate(run) if not hit), len(run))
            accepted, tried, calls = accepted + right, tried + len(run), calls + 1
            place += right + 1
        written += place
    return accepted / tried, written / calls


def print_drafts(rows: list[Row], wide: bool = False) -> None:
    """Print the results of `compare_drafts` as a table; each row has the key `model`, a name."""
    console, first, lines = results_console(), rows[0], []
    for row in rows:
        cells = [f"{row['accepted'][s]:.3f}, {row['per_call'][s]:.2f}" if s in row["accepted"] else "" for s in SIDES]
        lines.append([row["method"], *cells])
    console.print(
        f"{first['model']}: {first['tokens']} tokens after each of {first['rows']} prompts of {first['prompt']}, "
        f"{first['drafted']} drafted before each call. Packed is the cache of the model, of the draft, or of both."
    )
    print_figures(["method", *(f"{side}:\naccepted, a call" for side in SIDES)], lines, ["method"], wide)
