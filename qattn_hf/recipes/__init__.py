"""Recipes (`recipe.py`): files and YAML, checked settings, defaults of families, reasons of a choice."""
