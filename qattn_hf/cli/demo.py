"""`qattn demo`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    MethodOption,
    ModelArgument,
    OutputOption,
    RecipeOption,
    SetOption,
    chosen_recipe,
    for_family,
    write_data,
)
from qattn_hf.messages import size
from qattn_hf.model.loading import Loaded, load

if TYPE_CHECKING:
    from qattn_hf.cli._demo import Answer, Comparison
    from qattn_hf.cli._prompts import Prompt
    from qattn_hf.recipes.recipe import Recipe


def demo(
    model: ModelArgument = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the longest answer.")] = 96,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
) -> None:
    """Answer prompts in full precision and through a packed cache.

    The answers are printed side by side, then figures. The defaults are the embedded model and TurboAttention with
    4 bits. Examples:

    qattn demo --method turbo:bits=2

    qattn demo Qwen/Qwen3-0.6B --method int8
    """
    from qattn_hf.cli._prompts import demo_prompts
    from qattn_hf.recipes.recipe import check_packs

    chosen = chosen_recipe(method, recipe, settings, model)
    check_packs(chosen)
    loaded = load(model, device, dtype)
    chosen = for_family(chosen, loaded.model)
    prompts = [dataclasses.replace(p, max_new_tokens=min(p.max_new_tokens, max_new_tokens)) for p in demo_prompts()]
    label = cache_label(chosen)
    comparisons = run(loaded, prompts, chosen)
    rows = [dataclasses.asdict(comparison) for comparison in comparisons]
    data = {"model": loaded.name, "cache": label, "prompts": rows, "total": totals(comparisons)}
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        show(comparisons, loaded.name, label)
    write_data(data, output)
    if not any(comparison.packed_tokens for comparison in comparisons):
        raise RuntimeError(f"{label} packed nothing: the prompts are shorter than one of its blocks")
    if not as_json:
        print(verdict(comparisons, label))
        print(f"Next: {next_step(model, method or recipe or settings)}")


def run(loaded: Loaded, prompts: list[Prompt], recipe: Recipe) -> list[Comparison]:
    """Answer all prompts in full precision, then packed, with progress on stderr.

    The set-up of a first call is not timed; on a GPU every answer is generated once before it is timed.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from qattn_hf import patch
    from qattn_hf.cli._demo import answer, compare, forced_logits

    _, lm, tokenizer = loaded
    ids = [torch.tensor([tokenizer(prompt.text).input_ids], device=lm.device) for prompt in prompts]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = sum(prompt.max_new_tokens for prompt in prompts)
        task = progress.add_task("", total=3 * steps)

        def for_each_prompt(what: str, work: Callable[..., Any]) -> list[Any]:
            results = []
            for i, prompt in enumerate(prompts):
                progress.update(task, description=f"{what}: {prompt.name}", refresh=True)
                before = progress.tasks[0].completed
                results.append(work(i, prompt))
                progress.update(task, completed=before + prompt.max_new_tokens)  # an answer may stop early
            return results

        def advance() -> None:
            progress.advance(task)

        def timed(i: int, prompt: Prompt) -> Answer:
            if lm.device.type == "cuda":  # kernels get compiled and steps captured, for each length anew
                answer(lm, tokenizer, ids[i], prompt, lambda: None)
            return answer(lm, tokenizer, ids[i], prompt, advance)

        def answers(what: str) -> list[Any]:
            warm_up = dataclasses.replace(prompts[0], max_new_tokens=2)
            answer(lm, tokenizer, ids[0], warm_up, lambda: None)
            return for_each_prompt(what, timed)

        full = answers("full precision")
        patch(lm, recipe=recipe)
        packed = answers("packed")
        forced = for_each_prompt("comparing", lambda i, _: forced_logits(lm, ids[i], full[i].tokens, advance))
    return [compare(*parts) for parts in zip(prompts, ids, full, packed, forced, strict=True)]


def cache_label(recipe: Recipe) -> str:
    """`turbo`, or `turbo bits=2` when a setting differs from its default."""
    changed = [f"{key}={value}" for key, value in recipe.settings.model_dump(exclude_defaults=True).items()]
    changed += [f"layers {choice.where}: {choice.given}" for choice in recipe.choices]
    return " ".join([recipe.method, *changed])


def show(comparisons: list[Comparison], model: str, label: str) -> None:
    """The answers side by side, then the figures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    marks = {True: " [right]", False: " [wrong]", None: ""}
    for item in comparisons:
        question = item.prompt.text.strip().splitlines()[-1 if item.prompt.gold is None else -2]
        heading = Text(f"{item.prompt.name} ({item.prompt_tokens} tokens): ...{question[-56:]}", "bold")
        table = Table(title=heading, title_justify="left", expand=True)
        for name in ("full precision", label):
            table.add_column(name, ratio=1)
        table.add_row(
            Text(item.full_precision + marks[item.full_precision_right]), Text(item.packed + marks[item.packed_right])
        )
        console.print(table)
    figures = Table(title=Text(f"{model}: {label} against full precision", "bold"), title_justify="left")
    figures.add_column("")
    for name in ("same\ntokens", "first\nother", "KL", "KV full,\npacked", "bits packed,\nall", "tok/s full,\npacked"):
        figures.add_column(name, justify="right")
    for item in comparisons:
        bits = "-" if item.effective_bits is None else f"{item.effective_bits:.2f}"
        figures.add_row(
            item.prompt.name,
            f"{item.agreement:.0%}",
            "-" if item.first_difference is None else str(item.first_difference),
            f"{item.kl:.5f}",
            f"{size(item.kv_bytes_full_precision)},\n{size(item.kv_bytes)}",
            f"{bits},\n{item.effective_bits_total:.2f}",
            f"{item.tokens_per_second_full_precision:.0f},\n{item.tokens_per_second:.0f}",
        )
    console.print(figures)


def totals(comparisons: list[Comparison]) -> dict[str, float]:
    """Figures over all prompts; agreement, `same_top1` and KL are means over the answers' tokens."""
    tokens = sum(item.answer_tokens for item in comparisons)
    return {
        "answer_tokens": tokens,
        "agreement": sum(item.agreement * item.answer_tokens for item in comparisons) / tokens,
        "same_top1": sum(item.same_top1 * item.answer_tokens for item in comparisons) / tokens,
        "kl": sum(item.kl * item.answer_tokens for item in comparisons) / tokens,
        "kv_bytes": sum(item.kv_bytes for item in comparisons),
        "kv_bytes_full_precision": sum(item.kv_bytes_full_precision for item in comparisons),
        "tokens_per_second": _speed((item.packed_answer_tokens, item.tokens_per_second) for item in comparisons),
        "tokens_per_second_full_precision": _speed(
            (item.answer_tokens, item.tokens_per_second_full_precision) for item in comparisons
        ),
    }


def _speed(answers: Iterable[tuple[int, float]]) -> float:
    """All tokens over all seconds, of answers with these numbers of tokens and these speeds."""
    tokens, seconds = zip(*((count, count / speed) for count, speed in answers), strict=True)
    return sum(tokens) / sum(seconds)


def verdict(comparisons: list[Comparison], label: str) -> str:
    """One line that sums up the figures of all prompts."""
    total, first = totals(comparisons), comparisons[0]
    kv_bytes, full = total["kv_bytes"], total["kv_bytes_full_precision"]
    return (
        f"Verdict: {label} picks full precision's next token in {total['same_top1']:.1%} of "
        f"{total['answer_tokens']:.0f} steps, mean KL {total['kl']:.5f}, with {size(kv_bytes)} of KV cache instead of "
        f"{size(full)} ({full / kv_bytes:.1f}x smaller), at {total['tokens_per_second']:.0f} tokens a second instead "
        f"of {total['tokens_per_second_full_precision']:.0f} (computed by: {first.impl}, decode: {first.decode})."
    )


def next_step(model: str | None, changed: object) -> str:
    """The command to suggest after this demo."""
    if not changed:
        return "`qattn demo --method turbo:bits=2` packs tighter; `qattn methods` lists all methods and settings."
    if model is None:
        return "`qattn demo MODEL` does the same with your model."
    return "`qattn cache report --tokens 4096` with the same model and method shows a longer context, layer by layer."
