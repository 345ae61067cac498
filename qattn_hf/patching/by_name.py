"""`QAttnConfig`: patch a model while `from_pretrained` loads it, by Transformers' registry of quantizers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qattn_hf.choosing.choose import check_budget
from qattn_hf.patching.patcher import has_budget, patch
from qattn_hf.recipes.recipe import find_recipe

NAME = "qattn"


@register_quantization_config(NAME)
class QAttnConfig(QuantizationConfigMixin):
    """Arguments of `patch` for `from_pretrained(..., quantization_config=QAttnConfig("turbo"))`.

    The loaded model is the one that `patch` returns. Its weights and its config stay as they are, so `save_pretrained`
    writes a folder that loads without this package, with the recipe in `qattn.yaml`. Set `model.config.
    quantization_config` to this object before `save_pretrained` to write it to `config.json` as well: then
    `from_pretrained` patches the model wherever this class was imported, and loads it unpatched elsewhere.

    A checkpoint with quantized weights (GPTQ, FP8, MXFP4, ...) has a quantization config already, and Transformers
    accepts one. Load it as it is and call `patch(model, method)`.

    Args:
        method: a method's or a recipe's name, as in `patch`. None: the model chooses within `bits` or `kl`, or `turbo`.
        settings: settings of the method, or the budget `bits` or `kl` with the settings that all methods have, as in
            `patch`. They must be plain data that JSON can hold.

    Raises:
        RecipeError: an unknown method, recipe or setting, or an invalid value.
    """

    def __init__(self, method: str | None = None, *, quant_method: str = NAME, **settings: Any):
        self.quant_method = quant_method
        self.method, self.settings = method, {**settings.pop("settings", {}), **settings}
        if method is None and has_budget(self.settings):
            check_budget(self.settings)
        else:
            find_recipe(method, None, self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry `quantization_config` of a `config.json`."""
        return {"quant_method": self.quant_method, "method": self.method, "settings": dict(self.settings)}


@register_quantizer(NAME)
class QAttnQuantizer(HfQuantizer):
    """What `from_pretrained` calls for a `QAttnConfig`. It leaves weights alone and patches the loaded model."""

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config = self.quantization_config
        self.remove_quantization_config(model)
        del model.is_quantized
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        return patch(model, config.method, **config.settings)
