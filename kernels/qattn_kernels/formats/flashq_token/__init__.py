"""FlashQ that keeps the INT8 buffer's scale for each token: 4 or 2 bits per channel and a scale per token. Values
only."""
