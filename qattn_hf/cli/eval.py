"""`qattn eval`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qattn_hf.cli._common import (
    BatchOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    UsageError,
    WideOption,
    for_family,
    methods_option,
    print_rows,
    write_data,
)
from qattn_hf.model.loading import load

if TYPE_CHECKING:
    from qattn_hf.recipes.recipe import Recipe

DEFAULT = ("full", "turbo")  # full precision and one method


TaskOption = Annotated[list[str] | None, typer.Option("--task", help="Task of lm-eval, such as gsm8k_cot. Repeatable.")]
RecipesOption = Annotated[list[str] | None, typer.Option("--recipe", help="YAML file or name. Repeatable.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Rows of each task.")]
FewShotOption = Annotated[int | None, typer.Option("--num-fewshot", min=0, help="Number of examples in a prompt.")]
LongestOption = Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Tokens of the longest answer.")]
ChunkOption = Annotated[
    int | None, typer.Option("--chunk", min=1, help="Tokens of each call that reads a scored text.")
]
DataOption = Annotated[Path | None, typer.Option("--data-dir", help="Folder with local data, instead of the hub.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
UnsafeOption = Annotated[
    bool, typer.Option("--confirm-run-unsafe-code", help="Allow tasks to run code that the model writes.")
]
MetadataOption = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="KEY=VALUE", help="Setting of the tasks, such as lengths=[8192]."),
]


def evaluate(
    model: ModelArgument = None,
    task: TaskOption = None,
    method: Annotated[list[str] | None, methods_option(DEFAULT)] = None,
    recipe: RecipesOption = None,
    limit: LimitOption = None,
    num_fewshot: FewShotOption = None,
    max_new_tokens: LongestOption = None,
    batch: BatchOption = 8,
    chunk: ChunkOption = None,
    data_dir: DataOption = None,
    chat: ChatOption = False,
    confirm_run_unsafe_code: UnsafeOption = False,
    metadata: MetadataOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
    output: OutputOption = None,
    wide: WideOption = False,
) -> None:
    """Score methods on tasks of lm-eval.

    The model reads all texts through the packed cache. The command needs the extra `eval`.

    Example: qattn eval MODEL --task gsm8k_cot --method full --method turbo:k_bits=4,v_bits=2 --limit 50
    """
    if not task:
        raise UsageError("--task is missing: name a task, such as gsm8k_cot or recall_40")
    from qattn_hf.assets import demo_model_dir
    from qattn_hf.lm_eval import need_lm_eval
    from qattn_hf.recipes.spelling import parse_settings

    need_lm_eval()
    methods = chosen_recipes(method, recipe)
    from qattn_hf.lm_eval.run import rows

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs lines for every task
    name, lm, tokenizer = load(model, device, dtype)
    methods = {label: recipe and for_family(recipe, lm) for label, recipe in methods.items()}
    arguments = {"batch_size": batch, **({} if chunk is None else {"chunk": chunk})}
    options: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": chat}
    options |= {"gen_kwargs": {"max_gen_toks": max_new_tokens}} if max_new_tokens else {}
    options |= {"confirm_run_unsafe_code": confirm_run_unsafe_code}
    results = []
    metadata_of_tasks = {"pretrained": model or str(demo_model_dir()), **parse_settings(metadata, "--metadata")}
    for row in rows(lm, tokenizer, methods, task, data_dir, metadata_of_tasks, arguments, options):
        results.append({"model": name, **row})
        print(f"{row['method']}: {row['task']}: {row['metric']} {row['value']:.4g}", file=sys.stderr, flush=True)
        if as_json:
            print_rows(results[-1:])
    if not as_json:
        from qattn_hf.lm_eval.tables import print_table

        print_table(results, wide)
    write_data({"rows": results}, output)


def chosen_recipes(methods: list[str] | None, recipes: list[str] | None) -> dict[str, Recipe | None]:
    """Recipes of `--method` and `--recipe` by name, checked before a model loads; None for `full`, full precision."""
    from qattn_hf.lm_eval.arguments import FULL
    from qattn_hf.recipes.recipe import find_recipe, load_recipe
    from qattn_hf.recipes.spelling import split_method, split_methods

    chosen: dict[str, Recipe | None] = {}
    for name in split_methods(methods or (() if recipes else DEFAULT)):
        method, settings = split_method(name)
        if method == FULL and settings:
            raise UsageError(f"--method {name}: full precision has no settings")
        chosen[name] = None if method == FULL else find_recipe(name, None, {})
    return chosen | {name: load_recipe(name) for name in recipes or []}
