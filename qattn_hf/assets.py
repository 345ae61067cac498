"""Where the files that are not code lie: recipes and the demo model, in a wheel and in a source tree."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """Folder of the YAML recipes: inside the installed package, or `configs/` at the top of a source tree.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    installed, checkout = _PACKAGE / "configs", _PACKAGE.parent
    if installed.is_dir():
        return installed
    # `site-packages/configs` may belong to anybody, so a folder beside the package counts in our own tree only.
    if (checkout / "pyproject.toml").is_file() and (checkout / "configs").is_dir():
        return checkout / "configs"
    raise FileNotFoundError(f"qattn_hf has no recipes: neither {installed} nor {checkout / 'configs'}; install it anew")


def demo_model_dir() -> Path:
    """Folder of the demo model (`config.json`, `model.safetensors`, tokenizer).

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    folder = _PACKAGE / "demo_model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"qattn_hf has no demo model at {folder}; install it anew or name another model")
    return folder
