"""INT8 values with one scale per block or per row, and an unquantized ring (bf16/fp16/fp32)."""
