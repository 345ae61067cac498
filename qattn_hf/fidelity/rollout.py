"""Rollouts: a model writes through a packed cache, and the same model in full precision judges the text.

On a given text each token is predicted from the right tokens before it, so cache errors never accumulate. In a rollout
every cache continues a prompt with tokens of its choice. Full precision then reads the written text. The results are
the KL along the text, its perplexity, and where it leaves full precision's continuation.

Sampled tokens are chosen by the Gumbel-max trick. The noise depends on seed, row and step and is the same for every
cache. Equal probabilities thus choose equal tokens, and the first differing token is due to the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.sizes import size_of
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import Progress, Row, check_full, check_packed, packed
from qattn_hf.messages.console import print_figures, results_console
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.reading.metrics import Tokens, text_figures, token_figures
from qattn_hf.reading.texts import Reading, full_logits
from qattn_hf.recipes.recipe import Recipe

PRIME = 1_000_003
PARTS = 4  # quarters of a continuation, each with a separate KL


class Choice(NamedTuple):
    """Rule for choosing tokens: the likeliest (`temperature` 0), or sampled with the noise of `seed`."""

    temperature: float = 0.0
    seed: int = 0

    def __call__(self, logits: torch.Tensor, row: int, step: int) -> torch.Tensor:
        """Choose the next token, int64 `[B]`, of rows `row`, `row + 1`, ... from logits `[B, vocabulary]`."""
        if self.temperature == 0:
            return logits.argmax(-1)
        noise = torch.stack([self._gumbel(logits.shape[-1], row + i, step) for i in range(len(logits))])
        return (logits.float() / self.temperature + noise.to(logits.device)).argmax(-1)

    def _gumbel(self, size: int, row: int, step: int) -> torch.Tensor:
        mixed = ((self.seed * PRIME + row) * PRIME + step) % 2**32  # torch's generator takes 32 bits of seed
        generator = torch.Generator().manual_seed(mixed)
        return -torch.empty(size, dtype=torch.float32, device="cpu").exponential_(generator=generator).log()


GREEDY = Choice()


class Rollout(NamedTuple):
    """A continuation: its tokens, int64 `[B, N]`, the logits `[B, N, vocabulary]` that chose them, and the cache."""

    ids: torch.Tensor
    logits: torch.Tensor
    cache: Any


def roll_out(
    model: PreTrainedModel, prompt: torch.Tensor, tokens: int, choice: Choice, row: int = 0, cache: Any = None
) -> Rollout:
    """Continue prompts by `tokens` tokens, one at a time. An end-of-text token does not stop the continuation.

    Args:
        model: patched or unpatched model.
        prompt: int64 `[B, P]`, fed in chunks.
        row: index of the first row, for `choice`.
        cache: cache that the prompts continue. The model makes one by default.
    """
    chunks = list(feed(model, prompt.to(device_of(model)), cuts(prompt.shape[1]), cache=cache))
    logits, cache = [chunks[-1].logits[:, -1].to(model.dtype)], chunks[-1].cache
    ids = [choice(logits[0], row, 0)]
    while len(ids) < tokens:
        chunk = next(feed(model, ids[-1][:, None], [0, 1], cache=cache))
        cache = chunk.cache
        logits.append(chunk.logits[:, -1].to(model.dtype))
        ids.append(choice(logits[-1], row, len(ids)))
    return Rollout(torch.stack(ids, 1), torch.stack(logits, 1), cache)


def judged(model: PreTrainedModel, prompt: torch.Tensor, written: Rollout) -> Tokens:
    """Return `metrics.token_figures` of each written token. `model`, in full precision, reads the same text in chunks.

    Args:
        prompt: int64 `[B, P]`.
        written: the continuation of the prompt.
    """
    text = torch.cat([prompt.to(written.ids.device), written.ids], 1)
    first = prompt.shape[1] - 1  # the logits at this place predict the first written token
    full = torch.cat(full_logits(model, text, Reading(text, cuts(text.shape[1]), first, len(text))), 1)
    return {key: x.cpu() for key, x in token_figures(full[:, :-1], written.logits, written.ids).items()}


def compare_rollouts(
    model: PreTrainedModel,
    recipes: dict[str, Recipe],
    prompts: torch.Tensor,
    tokens: int = 512,
    choice: Choice = GREEDY,
    *,
    batch: int = 4,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Compare what a model writes through packed caches with what it writes in full precision.

    Args:
        model: unpatched model. It is left unchanged.
        recipes: recipes by name, as `find_recipes` makes them.
        prompts: int64 `[rows, P]`, without padding. tokens: length of each continuation, at least `PARTS`.
        choice: rule for choosing tokens.
        batch: rows that are continued at once.
        dtype: precision in which the model will run, if it differs from the precision measured here. Bits are counted
            in it.
        progress: called with a text before each step.

    Returns:
        One dict for each recipe, in order, for `print_rollouts`. `method` is the name. `kl` is the KL of full precision
        to the cache in nats per token, on the text that the cache wrote. `kl_se` is its standard error over rows,
        `kl_parts` the KL of each quarter. `same_top1` is the share of equal likeliest tokens. `first_divergence` is the
        mean index of the first token that differs from full precision's continuation, or `tokens` if all are equal.
        `same` is the share of rows where all are equal. `ppl` is the perplexity of the written text in full precision,
        `own_ppl` that of full precision's text. Bits follow.

    Raises:
        QAttnError: a recipe packed nothing, prompt and continuation are longer than the model's context, `tokens` is
            too small, or the model is patched.
    """
    check_rollout(model, prompts.shape[1], tokens)
    recipes = {name: recipe.for_model(model.config) for name, recipe in recipes.items()}
    figures: dict[str, list[Tokens]] = {name: [] for name in recipes}
    own: list[torch.Tensor] = []
    caches: dict[str, QAttnCache] = {}
    for row in range(0, len(prompts), batch):
        prompt = prompts[row : row + batch]
        group = f"rows {row + 1} to {row + len(prompt)}"
        progress(f"{group}: full precision")
        wanted = roll_out(model, prompt, tokens, choice, row)
        own.append(judged(model, prompt, wanted)["nll_full"])
        for name, recipe in recipes.items():
            progress(f"{group}: {name}")
            written = through(model, recipe, name, prompt, tokens, choice, row)
            figures[name].append(judged(model, prompt, written) | {"same_as_own": (written.ids == wanted.ids).cpu()})
            caches[name] = written.cache
    given = {"rows": len(prompts), "prompt": prompts.shape[1], "tokens": tokens, **choice._asdict()}
    own_ppl = torch.cat(own).double().mean().exp().item()
    rows = []
    for name, recipe in recipes.items():
        size = size_of(caches[name], prompts.shape[1] + tokens, dtype or model.dtype)
        bits = {"effective_bits": size.effective_bits, "effective_bits_total": size.effective_bits_total}
        asked = {"method": name, "recipe": {"method": recipe.method, **recipe.given()}}
        rows.append({**asked, **given, **rollout_figures(figures[name]), "own_ppl": own_ppl, **bits})
    return rows


def rollout_figures(groups: list[Tokens]) -> Row:
    """Compute figures of continuations from figures of their tokens.

    Args:
        groups: figures `[rows, N]` of each group of rows, as `judged` returns them, and `same_as_own`: whether a token
            equals full precision's token."""
    tokens = {key: torch.cat([group[key] for group in groups]) for key in groups[0]}
    prefix = tokens.pop("same_as_own").long().cumprod(1).sum(1)  # number of tokens before the first differing one
    whole = text_figures(tokens)
    return {
        **{key: whole[key] for key in ("kl", "kl_se", "same_top1")},
        "kl_parts": [part.double().mean().item() for part in tokens["kl"].tensor_split(PARTS, 1)],
        "first_divergence": prefix.double().mean().item(),
        "same": (prefix == tokens["kl"].shape[1]).double().mean().item(),
        "ppl": whole["ppl_full"],
    }


def through(
    model: PreTrainedModel, recipe: Recipe, name: str, prompt: torch.Tensor, tokens: int, choice: Choice, row: int
) -> Rollout:
    """Run `roll_out` through a packed cache.

    Args:
        name: name of the recipe, for the message.

    Raises:
        QAttnError: nothing was packed.
    """
    with packed(model, recipe):
        written = roll_out(model, prompt, tokens, choice, row)
        check_packed(written.cache, name, prompt.shape[1] + tokens, "take longer prompts or continuations")
    return written


def check_rollout(model: PreTrainedModel, prompt: int, tokens: int) -> None:
    """Refuse a patched model, and texts that are too short or too long for it.

    Raises:
        QAttnError: the model is patched, or the text has a wrong length.
    """
    if tokens < PARTS:
        raise QAttnError(f"continuations of {tokens} tokens have no {PARTS} parts: take at least {PARTS}")
    check_full(model, prompt + tokens, f"prompts of {prompt} tokens and continuations of {tokens}", "fewer of either")


def rollout_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Format results of `compare_rollouts` as a header and lines of text."""
    header = ["method", "KL", "quarter by quarter", "same top-1", "first divergence", "same", "perplexity", "bits, all"]
    lines = []
    for row in rows:
        error = "" if row["kl_se"] is None else f" ({row['kl_se']:.6f})"
        lines.append(
            [
                row["method"],
                f"{round(row['kl'], 6) + 0.0:.6f}{error}",
                " ".join(f"{round(kl, 4) + 0.0:.4f}" for kl in row["kl_parts"]),
                f"{row['same_top1']:.4f}",
                f"{row['first_divergence']:.0f}",
                f"{100 * row['same']:.0f} %",
                f"{row['ppl']:.2f}",
                f"{row['effective_bits_total']:.2f}",
            ]
        )
    return header, lines


def print_rollouts(rows: list[Row], wide: bool = False) -> None:
    """Print the results of `compare_rollouts` as a table, with an explanation of its columns.

    Args:
        rows: as `compare_rollouts` returns them, each with the key `model`, a name.
        wide: whether to keep cells unfolded in a narrow terminal.
    """
    console, first, (header, lines) = results_console(), rows[0], rollout_table(rows)
    how = f"sampled at temperature {first['temperature']:g}" if first["temperature"] else "greedy"
    console.print(
        f"{first['model']}: {first['rows']} prompts of {first['prompt']} tokens and {first['tokens']} tokens written "
        f"after each, {how}; perplexity of full precision's own {first['own_ppl']:.2f}"
    )
    print_figures(header, lines, ["method"], wide)
    console.print(
        "KL of full precision to the cache on the text that the cache wrote (standard error over rows), and perplexity "
        "of that text in full precision. First divergence: mean index of the first token that differs from full "
        "precision's continuation. Same: rows that never differ."
    )
