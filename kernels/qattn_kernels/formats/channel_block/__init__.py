"""Base of formats with one scale per token and block of channels, and an unquantized ring (bf16/fp16/fp32)."""
