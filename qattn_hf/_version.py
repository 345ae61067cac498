"""The version of the package. The build and `qattn_hf.__version__` read it from here."""

__version__ = "0.1.0"
