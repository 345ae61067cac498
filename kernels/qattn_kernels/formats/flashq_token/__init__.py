"""FlashQ whose tokens keep the scales of the INT8 buffer: 4 or 2 bits a channel behind a scale a token. Values only."""
