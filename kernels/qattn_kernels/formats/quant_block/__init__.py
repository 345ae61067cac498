"""llama.cpp's `q8_0` and `q4_0`: blocks of 32 channels of a token with one 16-bit scale."""
