"""Draft acceptance: the share of a draft model's tokens that a model accepts when one or both read a packed cache.

Greedy speculative decoding (Leviathan et al. 2023, Algorithm 1) accepts a drafted token if the model would write the
same token. A draft in full precision guesses what the model writes in full precision. Quantization errors of either
cache lower acceptance. The text is always written by the model, so acceptance changes speed alone.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import Progress, Row, packed
from qattn_hf.fidelity.rollout import GREEDY, check_rollout, roll_out
from qattn_hf.messages.console import print_figures, results_console
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.recipes.recipe import Recipe

SIDES = ("model", "draft", "both")  # the model or models that read a packed cache


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
        model, draft: unpatched models with one vocabulary. They are left unchanged.
        recipes: recipes by name, each tried for `model`, for `draft` and for both.
        prompts: int64 `[rows, P]`, without padding. tokens: number written greedily after each prompt.
        drafted: number of tokens drafted before each verification.
        batch: rows processed at once. progress: called with a text before each step.

    Returns:
        A dict for `full precision`, then one for each recipe, with the name as `method`. `accepted` (share of drafted
        tokens) and `per_call` (average number of tokens from a call of the model) have a number for each of `SIDES`.

    Raises:
        QAttnError: the vocabularies differ, the texts are too long, or a model is patched.
    """
    if (mine := model.config.get_text_config().vocab_size) != (other := draft.config.get_text_config().vocab_size):
        raise QAttnError(
            f"the model has a vocabulary of {mine} tokens and the draft one of {other}: use one with the same tokenizer"
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


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a draft model of a model's first layers, its norm and its head, as `assistant_early_exit` drafts.

    The draft shares the model's weights.

    Raises:
        QAttnError: the model has no more than `layers` layers.
    """
    has = model.config.get_text_config().num_hidden_layers
    if not 0 < layers < has:
        raise QAttnError(f"a draft of {layers} layers: the model has {has}, and a draft needs fewer, but at least one")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    draft = copy.deepcopy(model, shared)
    draft.get_decoder().layers = draft.get_decoder().layers[:layers]
    config = draft.config.get_text_config()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return draft


def guessed(draft: PreTrainedModel, prompt: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Guess each token of a continuation with a draft model that reads the text token by token.

    Args:
        prompt: int64 `[B, P]`.
        text: continuation, int64 `[B, N]`.

    Returns:
        The draft's likeliest token at each place of the continuation, int64 `[B, N]`."""
    device, length = device_of(draft), prompt.shape[1]
    ids = torch.cat([prompt.to(device), text.to(device)[:, :-1]], 1)
    at = [*cuts(length), *range(length + 1, ids.shape[1] + 1)]
    found = [chunk.logits[:, -1].argmax(-1) for chunk in feed(draft, ids, at)]
    return torch.stack(found[-text.shape[1] :], 1).to(text.device)


def acceptance(hits: torch.Tensor, drafted: int) -> tuple[float, float]:
    """Return the share of accepted drafted tokens, and the tokens that each call of the model yields.

    A call yields the drafted tokens up to the first wrong one, and then one token of the model.

    Args:
        hits: bool `[rows, N]`, whether the draft guesses a token right.
        drafted: number of tokens drafted before each call.
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
    """Print the results of `compare_drafts` as a table. Each row has the key `model`, a name."""
    console, first, lines = results_console(), rows[0], []
    for row in rows:
        cells = [f"{row['accepted'][s]:.3f}, {row['per_call'][s]:.2f}" if s in row["accepted"] else "" for s in SIDES]
        lines.append([row["method"], *cells])
    console.print(
        f"{first['model']}: {first['tokens']} tokens after each of {first['rows']} prompts of {first['prompt']}, "
        f"{first['drafted']} drafted before each call. Packed is the cache of the model, of the draft, or of both."
    )
    print_figures(["method", *(f"{side}:\naccepted, a call" for side in SIDES)], lines, ["method"], wide)
