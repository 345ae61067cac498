"""Folders of the package's data (recipes, task files, demo model), in an installation and in a source tree."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parent


def configs_dir() -> Path:
    """Folder of the YAML recipes: inside the installed package, or `configs/` at the top of a source tree.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    return _data_dir("configs", "configs", "recipes")


def tasks_dir() -> Path:
    """Folder of the task files for lm-eval: inside the installed package, or `eval/tasks/` of a source tree.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    return _data_dir("eval_tasks", "eval/tasks", "task files")


def _data_dir(inside: str, in_checkout: str, what: str) -> Path:
    installed, checkout = _PACKAGE / inside, _PACKAGE.parent
    if installed.is_dir():
        return installed
    # `site-packages/configs` may belong to another package, so a folder next to ours counts in a source tree only.
    if (checkout / "pyproject.toml").is_file() and (checkout / in_checkout).is_dir():
        return checkout / in_checkout
    raise FileNotFoundError(
        f"qattn_hf has no {what}: neither {installed} nor {checkout / in_checkout}; install it anew"
    )


def demo_model_dir() -> Path:
    """Folder of the demo model (`config.json`, `model.safetensors`, tokenizer).

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    folder = _HERE / "demo_model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"qattn_hf has no demo model at {folder}; install it anew or name another model")
    return folder
