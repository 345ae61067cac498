"""Run functions in forked processes, which have all modules and models of this one."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def start(run: Callable[[], Any], said: Path, **environment: str) -> int:
    """Fork a process that runs a function and ends, and return its id. What it prints is in the file `said`."""
    if child := os.fork():
        return child
    code = 1
    try:
        torch.set_num_threads(1)  # threads of the parent are not here
        os.environ.update(environment)
        with said.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            try:
                run()
                code = 0
            except BaseException:
                traceback.print_exc(file=file)
    finally:
        os._exit(code)


def wait(child: int, said: Path) -> str:
    """Return what a process printed. The test fails if the process did, with the end of what it printed."""
    _, status = os.waitpid(child, 0)
    text = said.read_text(encoding="utf-8")
    if status:
        pytest.fail(f"{f'signal {status & 127} at: ' if status & 127 else ''}{text[-6000:]}")
    return text
