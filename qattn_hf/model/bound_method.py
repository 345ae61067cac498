"""Functions as attributes of one model that do not keep it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from qattn_hf.errors import QAttnError


class BoundMethod:
    """A function bound to one model by a weak reference, as an attribute of that model.

    A strong reference would be a cycle, and the model's memory would stay allocated until Python looks for cycles.
    Copies and pickles of the model get a separate method.

    Raises:
        QAttnError: when called after the model was freed, as in `patch(load()).save_pretrained(folder)`. Python frees a
            model that no variable holds before it calls an attribute of the model.
    """

    def __init__(self, function: Callable, model: PreTrainedModel):
        self.function, self._model = function, weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (model := self._model()) is None:
            raise QAttnError(
                f"{self.function.__name__} was called on a patched model that no variable holds, so it is freed: "
                f"keep it in a variable, as in model = patch(...); model.{self.function.__name__}(...)"
            )
        return self.function(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundMethod:
        model: Any = self._model()
        return BoundMethod(self.function, memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return BoundMethod, (self.function, self._model())
