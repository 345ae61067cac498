"""`python -m qattn_hf.lm_eval run --model qattn ...`: lm-eval's command line with our model and task files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qattn_hf.errors import QAttnError
from qattn_hf.lm_eval import need_lm_eval, register


def main() -> None:
    """Run lm-eval's command line with the model `qattn`. The option `--data-dir DIR` reads data from local files."""
    need_lm_eval()
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    from qattn_hf.lm_eval.local import task_folders

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--data-dir", "--data_dir", type=Path)
    ours, sys.argv[1:] = own.parse_known_args()
    setup_logging()
    register()
    arguments = HarnessCLI().parse_args()
    theirs = getattr(arguments, "include_path", None)
    if config := getattr(arguments, "config", None):
        theirs = theirs or EvaluatorConfig.load_yaml_config(config).get("include_path")
    elif getattr(arguments, "model", "") is None:
        arguments.model = "qattn"  # lm-eval's default model would read no cache
    with task_folders(ours.data_dir) as folders:
        arguments.include_path = [*folders, *([theirs] if theirs else [])]
        arguments.func(arguments)
    _leave_processes()


def _leave_processes() -> None:
    """Wait for the other processes of a run, then leave their group.

    A process that exits while its threads still serve other processes may be aborted, which ends the run for all."""
    import torch.distributed as processes

    if processes.is_available() and processes.is_initialized():
        processes.barrier()
        processes.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except QAttnError as error:
        sys.exit(f"qattn_hf.lm_eval: {error}")
