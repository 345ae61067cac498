"""Where figures come from: date, device and versions, written beside them."""

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
    """Versions of what figures stand on; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "qattn_hf": __version__}


def device_name() -> str:
    """Name of the GPU, else of the CPU."""
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
