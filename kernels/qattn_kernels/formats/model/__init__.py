"""Unquantized keys or values (bf16/fp16/fp32): the control for every packed format."""
