"""Operations on packed KV caches: each has a plain PyTorch reference, which is its specification.

This package knows nothing of transformers or of `qattn_hf`; importing it loads neither Triton nor a GPU.
Short names everywhere: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, T new tokens, S cached tokens,
D head dim, NB blocks of capacity. Tensors are `[B, H, T, D]`.
"""
