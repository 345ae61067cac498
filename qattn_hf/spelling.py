"""Parse methods with settings from texts such as `turbo:bits=2`, for programs that take them as arguments.

`help(spelling.split_method)` documents a name.
"""

from qattn_hf.recipes.spelling import FULL, parse_settings, split_method, split_methods

__all__ = ["FULL", "parse_settings", "split_method", "split_methods"]
