"""FP8 E4M3 values with one scale per channel of a block or of a row, and an unquantized ring (bf16/fp16/fp32)."""
