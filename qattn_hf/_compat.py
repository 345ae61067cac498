"""Every branch on the version of transformers, and nothing else."""

from __future__ import annotations

import warnings

import transformers
from packaging.version import Version
from transformers import PretrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

TESTED = ("5.17", "5.23")


def warn_if_untested() -> None:
    """Warn if the installed transformers is outside the tested range (`TESTED`)."""
    minor = Version(transformers.__version__).release[:2]
    low, high = (Version(v).release for v in TESTED)
    if not low <= minor <= high:
        warnings.warn(
            f"qattn_hf was tested with transformers {TESTED[0]} to {TESTED[1]}, not with {transformers.__version__}",
            stacklevel=3,
        )


def layer_types(config: PretrainedConfig) -> list[str]:
    """Type of the attention of each layer of a text config: `full_attention`, `sliding_attention`, `dummy`, ...

    5.23 lists KV-sharing layers as `dummy`, 5.17 leaves them out at the end; here they are always there.
    """
    types = list(get_layer_types_and_kwargs(config)[0])
    return types + ["dummy"] * (config.num_hidden_layers - len(types))


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Sliding window of each layer of a text config, in tokens; None for layers of other types.

    5.23 has a dict of settings for each layer, 5.17 one for all.
    """
    types, settings = get_layer_types_and_kwargs(config)
    per_layer = settings if isinstance(settings, list) else [settings] * len(types)
    windows = [
        layer["sliding_window"] if kind == "sliding_attention" else None
        for kind, layer in zip(types, per_layer, strict=True)
    ]
    return windows + [None] * (config.num_hidden_layers - len(windows))
