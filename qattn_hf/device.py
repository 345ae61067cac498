"""Where a model computes, which need not be where its weights are between two calls."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def device_of(model: PreTrainedModel) -> torch.device:
    """The device on which a model computes: weights that accelerate offloads come there for a call."""
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        for one in getattr(hook, "hooks", [hook]):  # of accelerate: one, or a sequence
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device
