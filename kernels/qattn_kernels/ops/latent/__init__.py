"""Latent attention (MLA): one latent of a token is its value and, with the RoPE part, its key, for all query heads."""
