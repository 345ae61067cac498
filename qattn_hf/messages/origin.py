"""Conditions of figures: command, date, device and versions, recorded with them."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Any

import torch

from qattn_hf._version import __version__


def versions() -> dict[str, str | None]:
    """Versions of Python, torch, transformers, triton and this package; None: not installed.

    Torch's version names its CUDA build, such as 2.15.0+cu132. A wheel's metadata can lack it."""
    installed: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("transformers", "triton"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return {**installed, "qattn_hf": __version__}


def device_name() -> str:
    """Name of the first GPU, or of the CPU with its number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"CPU, {name}, {torch.get_num_threads()} threads"


def origin(command: str) -> dict[str, Any]:
    """The head of a result file: `command`, `date`, `device`, `versions`; its `rows` follow."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "versions": versions(),
    }
