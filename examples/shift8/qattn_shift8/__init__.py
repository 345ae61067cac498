"""A method and a format for qattn_hf, in a package of their own."""
