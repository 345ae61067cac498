"""FlashQ (TurboAttention): INT8 tokens first, then 4 or 2 bits a channel of a block, in integers."""
