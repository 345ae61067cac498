"""transformers' own server (`transformers serve`) with patched models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.patcher import patch

if TYPE_CHECKING:
    from qattn_hf.recipe import Recipe


def start(recipe: Recipe, **options: Any) -> Any:
    """Start the server in a thread of its own: what it loads is patched.

    Args:
        recipe: of every model. options: of `transformers serve`, by the names of its class `Serve`.

    Returns:
        the `Serve`, whose `kill_server()` stops it.

    Raises:
        QAttnError: FastAPI or uvicorn is not installed.
        UnsupportedError: the recipe packs nothing.
    """
    if not recipe.settings.packs():
        raise UnsupportedError("cache='model' packs nothing that a server could share: use transformers serve itself")
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager
    except ImportError as error:
        raise QAttnError(f"the server is not installed ({error}): pip install 'qattn-hf[serve]'") from None
    own = model_manager.ModelManager

    class PatchedModels(own):  # type: ignore[valid-type, misc]
        """A `ModelManager` that patches what it loads."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return patch(super()._load_model(*args, **kwargs).eval(), recipe=recipe)

    # `Serve` makes its manager by this name and takes none from its caller
    model_manager.ModelManager = PatchedModels
    try:
        return Serve(non_blocking=True, **options)
    except ImportError as error:
        raise QAttnError(f"the server is not installed ({error}): pip install 'qattn-hf[serve]'") from None
    finally:
        model_manager.ModelManager = own
