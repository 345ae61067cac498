"""One `generate` over a packed cache, for `model.generate(..., custom_generate=FOLDER_OR_REPOSITORY)`."""

from qattn_hf import patch, unpatch


def generate(model, method="turbo", **kwargs):
    """Generate as `model.generate(**kwargs)` with a packed cache, and leave the model unpatched.

    Args:
        model: an unpatched model, which Transformers passes.
        method: a method or recipe with its settings, such as `turbo:bits=4`.
        kwargs: arguments of `generate`.

    Raises:
        ValueError: the model is patched; a call of `generate` then has a packed cache by itself.
    """
    if hasattr(model, "_qattn"):
        raise ValueError("the model is patched and packs by itself. Fix: leave custom_generate out, or unpatch it")
    patch(model, method)
    try:
        return model.generate(**kwargs)
    finally:
        unpatch(model)
