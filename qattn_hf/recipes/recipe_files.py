"""Find recipe files: in this package, on disk, in a checkpoint's folder, in a hub repository.

Importing this module does not import torch.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from qattn_hf.assets import configs_dir
from qattn_hf.errors import RecipeError
from qattn_hf.messages import named
from qattn_hf.methods import is_method, list_methods
from qattn_hf.recipes.recipe_settings import unknown

RECIPE_FILE = "qattn.yaml"  # file name of a recipe in a checkpoint's folder and in a repository
YAML = (".yaml", ".yml")
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
log = logging.getLogger(__name__)


def list_recipes() -> list[str]:
    """Return the names of the recipes of this package: the files of `configs/`."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def recipe_file(source: str | Path) -> Path:
    """Return the path of a recipe's YAML file. A hub repository's file is downloaded.

    Args:
        source: a recipe's name, a YAML file, a folder with `qattn.yaml`, or a hub repository (`org/repo`).

    Raises:
        RecipeError: the recipe does not exist. The message lists the recipes of the package.
    """
    path = Path(source)
    if path.suffix in YAML:
        return _existing(path)
    if str(source) in list_recipes():
        return configs_dir() / f"{source}.yaml"
    if os.path.isdir(path):
        return _existing(path / RECIPE_FILE)
    if isinstance(source, str) and is_of_hub(source):
        return _downloaded(source)
    names = unknown("recipe", [str(source)], list_recipes())
    raise RecipeError(f"{names}, or a file that ends in .yaml, a folder with {RECIPE_FILE}, or a repository of the hub")


def check_name(name: str) -> None:
    """Refuse a name that is neither a method, nor a recipe, nor a place where `recipe_file` looks.

    Raises:
        RecipeError: the message has the nearest name.
    """
    if is_method(name):
        return
    known = list(dict.fromkeys([*list_methods(), *list_recipes()]))
    if name not in known and Path(name).suffix not in YAML and not os.path.isdir(name) and not is_of_hub(name):
        raise RecipeError(f"{unknown('method', [name], known)}, or a file that ends in .yaml")


def is_of_hub(name: str) -> bool:
    """Return whether a name looks like a hub repository, `org/repo`, and is not a local path."""
    return HUB_NAME.fullmatch(name) is not None and Path(name).suffix not in YAML and not os.path.exists(name)


def checkpoint_recipe(checkpoint: str | None) -> Path | None:
    """Return the `qattn.yaml` in the folder that a model was loaded from, and log it. None if there is none."""
    path = Path(checkpoint or "") / RECIPE_FILE
    if not checkpoint or not os.path.isfile(path):
        return None
    log.warning("using the recipe in the model's folder: %s; name a method or a recipe to use another one", path)
    return path


def _existing(path: Path) -> Path:
    if not os.path.isfile(path):
        what = ", which is a directory" if os.path.isdir(path) else ""
        raise RecipeError(
            f"no recipe at {named(str(path), 300)}{what}; recipes of this package: {', '.join(list_recipes())}"
        )
    return path


def _downloaded(repository: str) -> Path:
    """Return the path of a repository's `qattn.yaml`, from the hub or its local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, RECIPE_FILE))
    except LocalEntryNotFoundError:
        raise RecipeError(
            f"recipe {repository}: the hub cannot be reached, and its {RECIPE_FILE} is not in the local cache; give a "
            "file or a folder, or connect once"
        ) from None
    except (EntryNotFoundError, OSError, ValueError) as error:  # no such file, no access, or an invalid name
        reason = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        raise RecipeError(f"recipe {repository}: the hub gives no {RECIPE_FILE}: {named(reason, 300)}") from None
