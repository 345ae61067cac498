"""INT8 with one fp32 scale a token: the safe format, and the baseline beside every clever one."""
