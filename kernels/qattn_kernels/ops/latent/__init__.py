"""Latent attention (MLA): all query heads share one latent per token, which is its value and most of its key.

The RoPE part completes the key.
"""
