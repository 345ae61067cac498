"""The state of this machine for `qattn doctor`: its GPU, versions, and what compiling kernels needs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from qattn_hf.messages.origin import versions
from qattn_hf.model import _compat
from qattn_hf.planning.cards import Card
from qattn_kernels.chip import H200, KIB, Chip, as_chip, properties
from qattn_kernels.layer.support import no_triton

# First and last version that passed this project's tests; on a GPU, torch 2.11 with Triton 3.6 and 3.9.
TESTED = {
    "python": ("3.10", "3.13"),
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": _compat.TESTED,
}
COMPILERS = ("gcc", "clang", "cc")


def chip_for(card: Card | None) -> Chip:
    """Return the GPU to answer for: the named card, this machine's GPU, or without one an H200."""
    if card is not None:
        return card.chip
    return properties(torch.device("cuda")) if torch.cuda.is_available() else H200


def gpu_memory(card: Card | None) -> int | None:
    """Return the bytes of the named card or of this machine's GPU; None without both."""
    if card is not None:
        return card.memory_bytes
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def machine(card: Card | None = None) -> dict[str, Any]:
    """Describe the GPU and this machine.

    Args:
        card: answer for this GPU instead of the machine's.

    Returns:
        - `gpu`: `name`, `capability`, `multiprocessors`, `shared_kib` (shared memory of a program), `memory` in bytes,
          `configured` (the GPU whose launch configurations it uses); None without a GPU and `card`.
        - `here`: whether this machine has a GPU that torch can use. `launcher`: `driver` or `triton`, who launches
          kernels.
        - `versions`; `tested`, the first and last tested version by name; `untested`, a sentence for each version
          outside that range; `cuda`, the CUDA version that torch was built for, or None.
        - `compiler`: the C compiler that Triton would call, or None. `cache`: folder of compiled kernels, and
          `cache_writable`.
    """
    from qattn_kernels.step.kernel_facts import launcher

    cache = cache_folder()
    return {
        "gpu": None if gpu_memory(card) is None else gpu(chip_for(card), gpu_memory(card)),
        "here": torch.cuda.is_available(),
        "launcher": None if no_triton("cuda") else launcher(),
        "versions": versions(),
        "tested": TESTED,
        "untested": untested(versions()),
        "cuda": torch.version.cuda,
        "compiler": compiler(),
        "cache": str(cache).replace(str(Path.home()), "~", 1),
        "cache_writable": writable(cache),
    }


def gpu(chip: Chip, memory: int | None) -> dict[str, Any]:
    """Describe a GPU, as `machine` returns it."""
    from qattn_kernels.step.kernel_facts import measured_on

    with as_chip(chip):
        configured = measured_on()
    return {
        "name": chip.name,
        "capability": ".".join(map(str, chip.capability)),
        "multiprocessors": chip.multiprocessors,
        "shared_kib": chip.block // KIB,
        "memory": memory,
        "configured": configured,
    }


def untested(installed: dict[str, str | None]) -> list[str]:
    """Return a sentence for each installed version that this project was not tested with."""
    found = []
    for name, (first, last) in TESTED.items():
        version = installed[name]
        if version is not None and not Version(first) <= Version(".".join(version.split(".")[:2])) <= Version(last):
            found.append(f"{name} {version} is untested: {first} to {last} were tested")
    return found


def compiler() -> str | None:
    """Return the C compiler with which Triton builds its launchers, or None."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)


def cache_folder() -> Path:
    """Return the folder in which Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def writable(folder: Path) -> bool:
    """Return whether files can be written to a folder, or the folder can be made."""
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def problems(found: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing on this machine that keeps kernels from running.

    Args:
        found: result of `machine`.
    """
    reasons = []
    if not found["here"]:
        if shutil.which("nvidia-smi"):
            reasons.append(
                "torch finds no GPU, but nvidia-smi is installed. Fix: install a torch for CUDA (torch.version.cuda is "
                f"{torch.version.cuda}), or a driver that is new enough"
            )
        return reasons
    if (why := no_triton("cuda")) is not None:
        reasons.append(f"{why}, so the reference computes every layer. Fix: pip install triton")
    if found["compiler"] is None:
        reasons.append("Triton finds no C compiler. Fix: install gcc, or set CC")
    if not found["cache_writable"]:
        reasons.append(f"Triton cannot write to {found['cache']}. Fix: set TRITON_CACHE_DIR to another folder")
    return reasons
