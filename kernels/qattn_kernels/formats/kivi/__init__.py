"""KIVI: asymmetric 2- to 4-bit codes, of keys by channel over a group of tokens, of values by token over channels."""
