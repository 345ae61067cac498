"""Check from a config whether a method supports a model, and the size of its cache, as `qattn doctor` does.

    from qattn_hf import check

    result = check.check("Qwen/Qwen3-8B", "turbo")          # downloads a config, no weights
    result.refused, result.bytes_per_token, result.longest(80 * 2**30)

`help(check.check)` documents a name.
"""

from qattn_hf.planning.check import Check, check, without_weights

__all__ = ["Check", "check", "without_weights"]
