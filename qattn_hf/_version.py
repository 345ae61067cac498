"""The one place of the version: the build reads it from here, `qattn_hf.__version__` too."""

__version__ = "0.1.0"
