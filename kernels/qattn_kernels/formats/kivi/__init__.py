"""KIVI: asymmetric 2- to 4-bit codes. Keys are quantized per channel over a group of tokens, values per token."""
