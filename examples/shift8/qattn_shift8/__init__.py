"""A method and a format for qattn_hf, in a separate package."""
