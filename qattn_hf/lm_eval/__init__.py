"""lm-eval through the packed cache: its model `qattn`, `python -m qattn_hf.lm_eval` and what local data needs.

lm-eval's own model scores a text in one call, whose keys and values nobody reads back: every cache looks lossless
there. This one feeds texts through one cache in chunks. Needs the extra `eval`; importing this package does not.
"""

from __future__ import annotations

import importlib.util

from qattn_hf.errors import QAttnError


def need_lm_eval() -> None:
    """Say how to get lm-eval where it is missing.

    Raises:
        QAttnError: with the command.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise QAttnError("evaluation needs lm-eval, which is not installed: pip install 'qattn-hf[eval]'")


def register() -> None:
    """Make the model `qattn` known to lm-eval in this process; it may be called twice."""
    need_lm_eval()
    from lm_eval.api.registry import register_model

    from qattn_hf.lm_eval.model import QAttnLM

    register_model("qattn")(QAttnLM)
