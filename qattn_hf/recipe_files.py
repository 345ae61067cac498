"""Where recipes lie: in this package, in a file, beside a checkpoint's weights, in a repository of the hub."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from qattn_hf.assets import configs_dir
from qattn_hf.errors import RecipeError
from qattn_hf.messages import named
from qattn_hf.recipe_settings import unknown

BESIDE = "qattn.yaml"  # the name of a recipe in a checkpoint's folder and in a repository
YAML = (".yaml", ".yml")
OF_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")
log = logging.getLogger(__name__)


def list_recipes() -> list[str]:
    """Names of the recipes of this package: the files of `configs/`."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def recipe_file(source: str | Path) -> Path:
    """The file of a recipe: of a name, a file, a folder or a repository of the hub, which is downloaded.

    Raises:
        RecipeError: there is none; the message says what is there.
    """
    path = Path(source)
    if path.suffix in YAML:
        return _there(path)
    if str(source) in list_recipes():
        return configs_dir() / f"{source}.yaml"
    if os.path.isdir(path):
        return _there(path / BESIDE)
    if isinstance(source, str) and is_of_hub(source):
        return _downloaded(source)
    names = unknown("recipe", [str(source)], list_recipes())
    raise RecipeError(f"{names}, or a file that ends in .yaml, a folder with {BESIDE}, or a repository of the hub")


def is_of_hub(name: str) -> bool:
    """Whether a name is `org/repo`, and nothing here."""
    return OF_HUB.fullmatch(name) is not None and Path(name).suffix not in YAML and not os.path.exists(name)


def beside(checkpoint: str | None) -> Path | None:
    """The recipe in the folder that a model was loaded from, if there is one, which is then said in the log."""
    path = Path(checkpoint or "") / BESIDE
    if not checkpoint or not os.path.isfile(path):
        return None
    log.warning("the recipe beside the weights is used: %s; name a method or a recipe for another one", path)
    return path


def _there(path: Path) -> Path:
    if not os.path.isfile(path):
        what = ", which is a directory" if os.path.isdir(path) else ""
        raise RecipeError(
            f"no recipe at {named(str(path), 300)}{what}; recipes of this package: {', '.join(list_recipes())}"
        )
    return path


def _downloaded(repository: str) -> Path:
    """`qattn.yaml` of a repository, from the hub or its local cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, BESIDE))
    except LocalEntryNotFoundError:
        raise RecipeError(
            f"recipe {repository}: the hub cannot be reached, and its {BESIDE} is not in the local cache; give a file "
            "or a folder, or connect once"
        ) from None
    except (EntryNotFoundError, OSError, ValueError) as error:  # none there, no access, a name that none can have
        said = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
        raise RecipeError(f"recipe {repository}: the hub gives no {BESIDE}: {named(said, 300)}") from None
