"""INT8 with one fp32 scale per token: the safe format, and the baseline for all others."""
