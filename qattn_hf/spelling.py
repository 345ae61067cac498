"""Methods with settings as texts, `turbo:bits=2`, for programs that take them as arguments.

Each name is documented where it is defined: `help(spelling.split_method)`.
"""

from qattn_hf.recipes.spelling import FULL, parse_settings, split_method, split_methods

__all__ = ["FULL", "parse_settings", "split_method", "split_methods"]
