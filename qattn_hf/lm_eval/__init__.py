"""lm-eval through the packed cache: its model `qattn`, `python -m qattn_hf.lm_eval`, and tasks with local data.

lm-eval's own model scores a text in one call, in which no key or value is read from a cache, so that every cache looks
lossless. This model feeds texts through one cache in chunks. It needs the extra `eval`; this import does not.
"""

from __future__ import annotations

import importlib.util

from qattn_hf.errors import QAttnError


def need_lm_eval() -> None:
    """Check that lm-eval is installed.

    Raises:
        QAttnError: it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise QAttnError("evaluation needs lm-eval, which is not installed: pip install 'qattn-hf[eval]'")


def register() -> None:
    """Register the model `qattn` with lm-eval in this process; a second call has no effect."""
    need_lm_eval()
    from lm_eval.api.registry import register_model

    from qattn_hf.lm_eval.model import QAttnLM

    register_model("qattn")(QAttnLM)
