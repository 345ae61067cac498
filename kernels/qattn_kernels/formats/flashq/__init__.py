"""FlashQ (TurboAttention): INT8 per token first, then 4 or 2 bits per channel of a block, in integer arithmetic."""
