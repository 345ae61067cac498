"""Parts of `qattn_hf.recipe`: files and their YAML, checked settings, defaults of families, reasons of a choice."""
