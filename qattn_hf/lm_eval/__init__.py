"""Run lm-eval through the packed cache: its model `qattn`, `python -m qattn_hf.lm_eval`, and tasks with local data.

lm-eval's stock model scores a text in one call, which never reads keys or values from a cache. Every cache then looks
lossless. This model feeds texts through one cache in chunks. It needs the extra `eval`, but importing this package does
not.
"""

from __future__ import annotations

import importlib.util

from qattn_hf.errors import QAttnError


def need_lm_eval() -> None:
    """Check that lm-eval is installed.

    Raises:
        QAttnError: lm-eval is missing. The message has the command that installs it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise QAttnError("evaluation needs lm-eval, which is not installed: pip install 'qattn-hf[eval]'")


def register() -> None:
    """Register the model `qattn` with lm-eval in this process. A second call has no effect."""
    need_lm_eval()
    from lm_eval.api.registry import register_model

    from qattn_hf.lm_eval.model import QAttnLM

    register_model("qattn")(QAttnLM)
