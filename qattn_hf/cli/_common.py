"""Options that several commands share, and the files and recipes that the options name."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qattn_hf.messages import parse_size, size

if TYPE_CHECKING:
    from qattn_hf.recipes.recipe import Recipe


class UsageError(ValueError):
    """A command found an invalid option; the exit code is 2, as for options that typer refuses."""

    exit_code = 2


def known_methods(texts: list[str] | str | None) -> Any:
    """Return the methods of an option after a check of the names, which does not load torch.

    Raises:
        RecipeError: an unknown method or recipe, or a setting that is not `KEY=VALUE`.
    """
    from qattn_hf.recipes.recipe_files import check_name
    from qattn_hf.recipes.spelling import FULL, split_method, split_methods

    for text in [texts] if isinstance(texts, str) else split_methods(texts or ()):
        if (name := split_method(text)[0]) != FULL:
            check_name(name)
    return texts


def known_recipe(text: str | None) -> Any:
    """Return the recipe of an option after a check of the name, which does not load torch; files are read later.

    Raises:
        RecipeError: there is no recipe of that name.
    """
    from qattn_hf.recipes.recipe_files import YAML, is_of_hub, recipe_file

    if text is not None and Path(text).suffix not in YAML and not is_of_hub(text):
        recipe_file(text)
    return text


def read_settings(texts: list[str] | None) -> Any:
    """Return the settings of an option after parsing them, which does not load torch; names are checked later.

    Raises:
        RecipeError: one is not `KEY=VALUE`, or is given twice.
    """
    from qattn_hf.recipes.spelling import parse_settings

    parse_settings(texts)
    return texts


def known_device(text: str | None) -> str | None:
    """Return the text of `--device` after a check that torch can use this device.

    Raises:
        UsageError: torch knows no such device, or finds no such GPU.
    """
    if text is not None:
        import torch

        try:
            device = torch.device(text)
        except RuntimeError:
            raise UsageError(f"--device {text} is unknown. Fix: give cpu, cuda or cuda:0") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"--device {text}: torch {torch.__version__} finds {torch.cuda.device_count()} GPUs. "
                "Fix: --device cpu, or install torch with CUDA"
            )
    return text


def bytes_of(text: str) -> int:
    """Bytes of a size such as `24GiB`.

    Raises:
        BadParameter: the text is no size, or has no unit.
    """
    try:
        n_bytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if text.strip()[-1].isdigit():
        raise typer.BadParameter(f"{text} has no unit. Fix: type {text.strip()}GiB, or another unit")
    return n_bytes


def size_option(name: str, what: str, default: str | None = None) -> Any:
    """An option that takes a size and gives bytes.

    Args:
        name: the option, such as `--weights`. what: its help, without a period. default: the default in words.
    """
    words = f"{what}, such as 24GiB or 80GB."
    return typer.Option(name, parser=bytes_of, metavar="SIZE", help=words, show_default=default or False)


def card_of(name: str) -> Any:
    """The card that `--gpu` names.

    Raises:
        BadParameter: the card is unknown.
    """
    from qattn_hf.planning.cards import CARDS

    if (card := CARDS.get(name.lower())) is None:
        raise typer.BadParameter(f"{name} is unknown. Fix: give one of {', '.join(CARDS)}")
    return card


def methods_option(default: Iterable[str]) -> Any:
    """The option `--method` of commands that compare several methods; `default`: the methods without it."""
    words = "A method such as kivi:bits=4, or a recipe's name or file. Repeat it, or put commas between."
    return typer.Option("--method", help=words, show_default=", ".join(default), callback=known_methods)


GpuOption = Annotated[
    Any,
    typer.Option(
        "--gpu", parser=card_of, metavar="CARD", help="Answer for a card such as rtx-4090, l4 or a100, not this GPU."
    ),
]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder or hub name of a causal LM.", show_default="embedded model"),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="A method, a recipe's name or a YAML file, with settings such as turbo:bits=2. `qattn methods` lists all.",
        show_default="turbo",
        callback=known_methods,
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", help="A recipe: a YAML file, a name or a hub repository.", callback=known_recipe),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="One setting of the method, such as bits=2. Repeatable.",
        callback=read_settings,
    ),
]  # fmt: skip
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device, such as cpu or cuda:0.", show_default="a GPU if there is one", callback=known_device
    ),
]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Precision of the model. auto is the checkpoint's.")]
MeasuredDtypeOption = Annotated[
    Precision,
    typer.Option("--dtype", help="Precision to measure in. float32 shows the smallest damage, auto is the model's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of text.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="JSON file for the results, the command, device and versions.")
]
WideOption = Annotated[bool, typer.Option("--wide", help="Print all columns of the table, and fold none.")]
PictureOption = Annotated[Path | None, typer.Option("--picture", help="PNG file for a picture. Needs matplotlib.")]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="Text file to read.", show_default="generated prose, sums and lists")
]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Rows of the text.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=8, help="Tokens of a row. The last two thirds are scored.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Rows that are read at once.")]
BatchTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of all requests in one forward pass.", show_default="8192")
]
AtTokensOption = Annotated[int, typer.Option("--at-tokens", min=1, help="Context length for which bits are counted.")]
MemoryOption = Annotated[
    int | None, size_option("--gpu-memory", "Memory of the GPU", "the memory of the GPU here, or of --gpu")
]
WeightsOption = Annotated[
    int | None, size_option("--weights", "Size of the weights", "counted, unless they are quantized")
]


def need_picture(picture: Path | None) -> None:
    """Fail before the work, not after it, where matplotlib is missing."""
    if picture is not None:
        from qattn_hf.bench.picture import need_matplotlib

        need_matplotlib("--picture")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: the file holds no text, or is not in UTF-8.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: the file is not UTF-8 text. Fix: convert it, for example with iconv") from None
    if not content.strip():
        raise ValueError(f"{path}: the file holds no text")
    return content


def text_or_made(path: Path | None, tokens: int) -> str:
    """Return the text of `--text`, or a generated text of at least `tokens` tokens."""
    from qattn_hf.compare import made_text

    # a token of the generated text has fewer than eight characters on average
    return made_text(8 * tokens) if path is None else read_text(path)


def write_data(data: dict[str, Any], target: Path | None) -> None:
    """Write results with command, date, device and versions as JSON, in the form of `eval/results/`."""
    if target is None:
        return
    from qattn_hf.messages.origin import origin

    conditions = origin(shlex.join(["qattn", *sys.argv[1:]]))
    target.write_text(json.dumps({"name": target.stem, **conditions, **data}, indent=1) + "\n", encoding="utf-8")


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Print one line of JSON for each row."""
    for row in rows:
        print(json.dumps(row), flush=True)


def chosen_recipe(
    method: str | None, recipe: str | None, settings: list[str] | None, model: str | None = None
) -> Recipe:
    """The recipe that the options name, checked before a model loads.

    Without method and recipe the recipe is `qattn.yaml` in the folder `model`, else `turbo`.

    Raises:
        RecipeError: an unknown method, recipe or setting, or an invalid value.
    """
    from qattn_hf.recipes.recipe import find_recipe
    from qattn_hf.recipes.spelling import parse_settings

    folder = None if model is None else str(Path(model).expanduser())
    return find_recipe(method, recipe, parse_settings(settings), checkpoint=folder)


def for_family(recipe: Recipe, model: Any) -> Recipe:
    """The recipe with the defaults of the model's family; a line on stderr names them."""
    recipe = recipe.for_model(model.config)
    if recipe.family is not None and (changed := recipe.from_family()):
        settings = " ".join(f"{key}={value}" for key, value in changed.items())
        print(f"{recipe.method} has {settings} for {recipe.family}; family=false leaves it out", file=sys.stderr)
    return recipe


def measured_in(model: Any, dtype: str) -> Any:
    """Convert a model to the precision to measure in, and return the precision in which the model was loaded."""
    import torch

    own = model.dtype
    if dtype != "auto":
        model.to(getattr(torch, dtype))
    return own


def status_line() -> Any:
    """Context manager of a status line on stderr. The value is a function that sets the text."""
    from contextlib import contextmanager

    from rich.console import Console

    @contextmanager
    def status() -> Any:
        with Console(stderr=True).status("loading") as shown:
            yield shown.update

    return status()


def summary(report: dict[str, Any]) -> str:
    """One line about the content of a cache, from `Report.to_dict()`."""
    if not report["kv_bytes"]:
        return f"{report['method']}: nothing packed, transformers' own cache held the tokens"
    kv_bytes, full = report["kv_bytes"], report["kv_bytes_full_precision"]
    text = f"{report['method']}: {report['packed_tokens']} tokens packed, {report['open_tokens']} open; "
    text += f"{size(kv_bytes)} instead of {size(full)}"
    if report["effective_bits"] is not None and report["packed_tokens"]:
        text += (
            f"; {report['effective_bits']:.2f} bits a value where packed, {report['effective_bits_total']:.2f} in all"
        )
    return text + (" (in a short context the open tokens and spare room weigh most)" if kv_bytes > full else "")
